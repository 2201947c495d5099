//! Shared memory that is no file's, as the list of a process's mappings shows it. Its pages belong to an object of the kernel and
//! stay there when nobody maps them, or when all who do have given them up; then they count for no process.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::{
    fs::{AtFlags, Mode, OFlags, openat, statat},
    io::{Errno, read},
};

/// How much of a list is read at a time. No line of it is longer.
const CHUNK: usize = 64 << 10;

/// In what units the size of what a file has is told.
const BLOCK: u64 = 512;

/// What the kernel calls such objects, as a list begins to. No file that a task makes can be taken for one to another's harm.
const NAMES: [&[u8]; 4] = [b"/dev/zero", b"/SYSV", b"/memfd:", b"[anon_shmem:"];

/// Which object of the kernel.
pub(super) type Id = (u64, u64);

/// An object that a process maps, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) id: Id,
    /// Where the mapping ends in it, in bytes: it has been as large at least.
    pub(super) end: u64,
    /// What it has, mapped or not, in bytes; where this user may know.
    pub(super) has: Option<u64>,
}

/// Reads a list of mappings and calls `found` with each object in it, until that returns false.
pub(super) fn read_objects(
    folder: BorrowedFd<'_>,
    list: &str,
    mut found: impl FnMut(Object) -> bool,
) -> rustix::io::Result<()> {
    let file = openat(folder, list, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut buffer = vec![0; CHUNK];
    let (mut filled, mut before) = (0, None);
    loop {
        let n_read = match read(&file, &mut buffer[filled..]) {
            Err(Errno::INTR) => continue,
            done => done?,
        };
        filled += n_read;
        let whole = buffer[..filled].iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        for line in buffer[..whole].split(|byte| *byte == b'\n') {
            let Some((range, object)) = parse(line) else { continue };
            // Parts of the same one are mostly side by side.
            let has = match before {
                Some((id, has)) if id == object.id => has,
                _ => held(folder, range),
            };
            before = Some((object.id, has));
            if !found(Object { has, ..object }) {
                return Ok(());
            }
        }
        if n_read == 0 || (whole == 0 && filled == CHUNK) {
            return Ok(());
        }
        buffer.copy_within(whole..filled, 0);
        filled -= whole;
    }
}

/// Returns what the object has that is mapped at a range of addresses. Only the administrator of the machine may know.
fn held(folder: impl AsFd, range: &str) -> Option<u64> {
    let stat = statat(folder, format!("map_files/{range}"), AtFlags::empty()).ok()?;
    u64::try_from(stat.st_blocks).ok()?.checked_mul(BLOCK)
}

/// Returns the range of addresses in a line of the list, and the object that is mapped there.
fn parse(line: &[u8]) -> Option<(&str, Object)> {
    let mut rest = line;
    let mut field = || {
        let end = rest.iter().position(|byte| *byte == b' ').unwrap_or(rest.len());
        let (field, after) = rest.split_at(end);
        rest = after.get(1..).unwrap_or_default();
        std::str::from_utf8(field).ok()
    };
    let (range, modes, offset, device, inode) = (field()?, field()?, field()?, field()?, field()?);
    let name = rest.trim_ascii_start();
    if !modes.ends_with('s') || !NAMES.iter().any(|prefix| name.starts_with(prefix)) {
        return None;
    }
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let (first, last) = range.split_once('-')?;
    let (major, minor) = device.split_once(':')?;
    let end = hex(offset)?.checked_add(hex(last)?.checked_sub(hex(first)?)?)?;
    let device = hex(major)?.checked_mul(1 << 32)?.checked_add(hex(minor)?)?;
    Some((range, Object { id: (device, inode.parse().ok()?), end, has: None }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn shared_memory_is_found_under_every_name() {
        let object = |end| Some(("7f00-8f00", Object { id: (1, 42), end, has: None }));
        let names = [
            "/dev/zero (deleted)",
            "/dev/zero",
            "/SYSV00000000 (deleted)",
            "[anon_shmem:a name]",
            "/memfd:a (deleted)",
        ];
        for name in names {
            assert_eq!(
                parse(format!("7f00-8f00 rw-s 00002000 00:01 42        {name}").as_bytes()),
                object(0x3000),
                "{name}"
            );
        }
        assert_eq!(parse(b"7f00-8f00 rw-p 00000000 00:05 42        /dev/zero"), None, "its own");
        assert_eq!(parse(b"7f00-8f00 rw-s 00000000 00:1c 42        /tmp/file"), None, "on a disk of bounded size");
        assert_eq!(parse(b"7f00-8f00 rw-p 00000000 00:00 0 "), None);
    }

    proptest! {
        #[test]
        fn nonsense_is_no_harm(bytes: Vec<u8>, line in "[0-9a-f]{0,17}-[0-9a-f]{0,17} rw-s [0-9a-f]{0,17} [0-9a-f:]{0,9} [0-9]{0,21} /dev/zero") {
            let _ = (parse(&bytes).map(drop), parse(line.as_bytes()).map(drop));
        }
    }
}
