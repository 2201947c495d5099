//! The frame that Singularity puts around a squashfs: a header, a table of descriptors, and what those point at.
//!
//! All numbers are little-endian. Offsets below are those of the format's version 01.

use std::{
    fs::File,
    io::{self, Read as _},
    os::unix::fs::FileExt as _,
    time::{SystemTime, UNIX_EPOCH},
};

use super::ImageError;

/// Where an image file that [`write_header`] completes has its squashfs: behind the header and the table, at a page's start, so
/// that it can be mounted. In bytes.
pub(crate) const DATA_OFFSET: u64 = 32_768;

const LAUNCH_LEN: usize = 32;
const LAUNCH: &[u8] = b"#!/usr/bin/env run-singularity\n";
const MAGIC: &[u8] = b"SIF_MAGIC\0";
const VERSION: &[u8] = b"01\0";
const HEADER_LEN: usize = 128;

const DESCRIPTOR_LEN: usize = 585;
const DESCRIPTORS_OFFSET: u64 = 4096;
const N_DESCRIPTORS: u8 = 48;
/// More than any writer makes room for.
const MAX_DESCRIPTORS: u64 = 1 << 16;

const SQUASHFS_MAGIC: &[u8] = b"hsqs";
const SQUASHFS_MAGIC_BIG_ENDIAN: &[u8] = b"sqsh";

/// Kinds of data.
const DEFINITION: u32 = 0x4001;
const PARTITION: u32 = 0x4004;
const JSON: u32 = 0x4006;
const OCI_INDEX: u32 = 0x400a;

/// How launchers find what they show of an image.
const INSPECTION: &str = "inspect-metadata.json";

/// The only group of objects in the files written here; the bit says that it is a group.
const GROUP: u32 = 0xf000_0001;

/// Kinds of partitions and of file systems in them.
const PRIMARY: u32 = 2;
const SQUASHFS: u32 = 1;

/// What the format calls processors, and what they are called elsewhere.
const ARCHITECTURES: [(&[u8; 2], &str); 12] = [
    (b"01", "x86"),
    (b"02", "x86_64"),
    (b"03", "arm"),
    (b"04", "aarch64"),
    (b"05", "powerpc64"),
    (b"06", "powerpc64le"),
    (b"07", "mips"),
    (b"08", "mipsel"),
    (b"09", "mips64"),
    (b"10", "mips64el"),
    (b"11", "s390x"),
    (b"12", "riscv64"),
];

/// What an image file is, and where its squashfs lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packed {
    /// A SIF, with the place of its primary partition, in bytes.
    Sif { offset: u64, len: u64 },
    /// A squashfs from its first byte on.
    Squashfs { len: u64 },
}

/// Tells by its content what an image file is.
///
/// # Errors
/// [`ImageError::Source`] for a file that is neither, or a SIF of a kind that cannot be unpacked; [`ImageError::Damaged`] for a
/// SIF that contradicts itself.
pub(crate) fn recognise(file: &File, image: &str) -> Result<Packed, ImageError> {
    let unreadable = |error| ImageError::at("read", image, error);
    let file_len = file.metadata().map_err(unreadable)?.len();
    let source = |problem: &str| ImageError::Source { image: image.to_owned(), problem: problem.to_owned() };
    let mut header = [0; HEADER_LEN];
    let n_read = read_up_to(file, &mut header, 0).map_err(unreadable)?;
    if header.starts_with(SQUASHFS_MAGIC) {
        return Ok(Packed::Squashfs { len: file_len });
    }
    if header.starts_with(SQUASHFS_MAGIC_BIG_ENDIAN) {
        return Err(source(
            "is a squashfs of before 2009, in another byte order; pack it again with today's mksquashfs",
        ));
    }
    if !header[LAUNCH_LEN..].starts_with(MAGIC) {
        return Err(source("is neither a .sif nor a squashfs"));
    }
    let damaged =
        |what: &str, problem: String| ImageError::Damaged { image: image.to_owned(), what: what.to_owned(), problem };
    if n_read < HEADER_LEN {
        return Err(damaged("its header", "ends early".to_owned()));
    }
    let mut fields = Fields(&header[LAUNCH_LEN + MAGIC.len()..]);
    let version = fields.bytes(3);
    if version != VERSION {
        let version = String::from_utf8_lossy(version).trim_end_matches('\0').to_owned();
        return Err(source(&format!("is a .sif of version {version:?}, and only 01 is known")));
    }
    let _architecture_and_id = fields.bytes(3 + 16);
    let _created_modified_free = fields.bytes(3 * 8);
    let (n_descriptors, table, table_len) = (fields.u64(), fields.u64(), fields.u64());
    let needed = n_descriptors.checked_mul(DESCRIPTOR_LEN as u64);
    let end = needed.and_then(|len| table.checked_add(len));
    if n_descriptors > MAX_DESCRIPTORS
        || needed.is_none_or(|len| len > table_len)
        || end.is_none_or(|end| end > file_len)
    {
        let problem = format!("claims {n_descriptors} entries at byte {table}, and the file has {file_len} bytes");
        return Err(damaged("its table of contents", problem));
    }
    let mut is_oci = false;
    for idx in 0..n_descriptors {
        let mut bytes = [0; DESCRIPTOR_LEN];
        file.read_exact_at(&mut bytes, table + idx * DESCRIPTOR_LEN as u64).map_err(unreadable)?;
        let descriptor = Descriptor::parse(&bytes);
        is_oci |= descriptor.used && descriptor.kind == OCI_INDEX;
        if !descriptor.used || descriptor.kind != PARTITION || descriptor.partition_kind != PRIMARY {
            continue;
        }
        if let Some(problem) = descriptor.refusal() {
            return Err(source(&problem));
        }
        let Descriptor { offset, len, .. } = descriptor;
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > file_len) {
            let problem =
                format!("claims {len} bytes at byte {offset}, and the file has {file_len}; was it copied whole?");
            return Err(damaged("its primary partition", problem));
        }
        return Ok(Packed::Sif { offset, len });
    }
    Err(source(if is_oci {
        "is an OCI-SIF, which holds layers instead of a file system; convert it by `apptainer build new.sif` from its source"
    } else {
        "is a .sif without a primary system partition; there is nothing to unpack"
    }))
}

/// What a descriptor says of what can be unpacked.
struct Descriptor {
    kind: u32,
    used: bool,
    offset: u64,
    len: u64,
    file_system: u32,
    partition_kind: u32,
    architecture: [u8; 2],
}

impl Descriptor {
    fn parse(bytes: &[u8; DESCRIPTOR_LEN]) -> Self {
        let mut fields = Fields(bytes);
        let kind = fields.u32();
        let used = fields.bytes(1) == [1];
        let _id_group_link = fields.bytes(3 * 4);
        let (offset, len) = (fields.u64(), fields.u64());
        let _padded_len_times_owners_name = fields.bytes(5 * 8 + 128);
        let (file_system, partition_kind) = (fields.u32(), fields.u32());
        let architecture = [fields.u8(), fields.u8()];
        Self { kind, used, offset, len, file_system, partition_kind, architecture }
    }

    /// Says why this partition cannot be unpacked here.
    fn refusal(&self) -> Option<String> {
        let convert = "convert it by `apptainer build new.sif old.sif`";
        match self.file_system {
            SQUASHFS => {}
            2 => return Some(format!("holds an ext3 file system instead of a squashfs; {convert}")),
            5 => {
                let how = "on a machine that has its key, `apptainer build --sandbox FOLDER` makes a folder of it";
                return Some(format!("is encrypted; {how}"));
            }
            other => return Some(format!("holds a file system of kind {other} instead of a squashfs; {convert}")),
        }
        // Writers that do not know the processor write 00.
        let name = ARCHITECTURES.iter().find(|(code, _)| **code == self.architecture)?.1;
        let other = name != std::env::consts::ARCH;
        other.then(|| format!("is for {name} processors, and this machine's is {}", std::env::consts::ARCH))
    }
}

/// Little-endian fields from the front of bytes that are known to be long enough.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        bytes
    }

    fn u8(&mut self) -> u8 {
        self.bytes(1)[0]
    }

    fn u32(&mut self) -> u32 {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(self.bytes(4));
        u32::from_le_bytes(bytes)
    }

    fn u64(&mut self) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(self.bytes(8));
        u64::from_le_bytes(bytes)
    }
}

/// Fills as much of `buf` as the file has.
fn read_up_to(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut n_read = 0;
    while n_read < buf.len() {
        match file.read_at(&mut buf[n_read..], offset + n_read as u64) {
            Ok(0) => break,
            Ok(n) => n_read += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(n_read)
}

/// Makes a SIF of a file whose squashfs of `squashfs_len` bytes starts at [`DATA_OFFSET`], with nothing behind it but padding:
/// writes what comes before, and behind it the definition that the image was built from and, as JSON, what a launcher shows of the
/// image when it is asked: it would start the image to look. The file is not made durable.
///
/// # Errors
/// When the file cannot be written, or the processor has no number in the format.
pub(crate) fn write_header(
    file: &File,
    squashfs_len: u64,
    definition: Option<&str>,
    inspection: Option<&str>,
) -> io::Result<()> {
    let this = std::env::consts::ARCH;
    let architecture = ARCHITECTURES.iter().find(|(_, name)| *name == this).map(|(code, _)| **code);
    let architecture =
        architecture.ok_or_else(|| io::Error::other(format!("a .sif cannot be for {this} processors")))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());

    let mut objects = vec![Object {
        kind: PARTITION,
        offset: DATA_OFFSET,
        len: squashfs_len,
        name: "root",
        extra: [&SQUASHFS.to_le_bytes()[..], &PRIMARY.to_le_bytes(), &architecture].concat(),
    }];
    let mut end = DATA_OFFSET + squashfs_len;
    for (kind, name, text) in [(DEFINITION, "definition", definition), (JSON, INSPECTION, inspection)] {
        let Some(text) = text else { continue };
        file.write_all_at(text.as_bytes(), end)?;
        let len = text.len() as u64;
        objects.push(Object { kind, offset: end, len, name, extra: Vec::new() });
        end += len;
    }
    file.set_len(end)?;

    let mut table = Vec::with_capacity(usize::from(N_DESCRIPTORS) * DESCRIPTOR_LEN);
    for (id, object) in (1..).zip(&objects) {
        object.write(id, now, &mut table);
    }
    let table_len = usize::from(N_DESCRIPTORS) * DESCRIPTOR_LEN;
    table.resize(table_len, 0);
    file.write_all_at(&table, DESCRIPTORS_OFFSET)?;

    let mut id = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut id)?;
    // The bits that say "made of random bytes", as readers show the id.
    id[6] = id[6] & 0x0f | 0x40;
    id[8] = id[8] & 0x3f | 0x80;
    let mut header = Vec::with_capacity(HEADER_LEN);
    header.extend(LAUNCH);
    header.resize(LAUNCH_LEN, 0);
    header.extend(MAGIC);
    header.extend(VERSION);
    header.extend(architecture);
    header.push(0);
    header.extend(id);
    let data_offset = DESCRIPTORS_OFFSET + table_len as u64;
    let n_free = u64::from(N_DESCRIPTORS) - objects.len() as u64;
    for number in [
        now,
        now,
        n_free,
        u64::from(N_DESCRIPTORS),
        DESCRIPTORS_OFFSET,
        table_len as u64,
        data_offset,
        end - data_offset,
    ] {
        header.extend(number.to_le_bytes());
    }
    // The header last: until it is there, the file is no image.
    file.write_all_at(&header, 0)
}

/// Something that the table points at.
struct Object {
    kind: u32,
    offset: u64,
    len: u64,
    name: &'static str,
    extra: Vec<u8>,
}

impl Object {
    fn write(&self, id: u32, now: u64, table: &mut Vec<u8>) {
        let end = table.len() + DESCRIPTOR_LEN;
        table.extend(self.kind.to_le_bytes());
        table.push(1);
        for number in [id, GROUP, 0] {
            table.extend(number.to_le_bytes());
        }
        for number in [self.offset, self.len, self.len, now, now, 0, 0] {
            table.extend(number.to_le_bytes());
        }
        let name_end = table.len() + 128;
        table.extend(self.name.as_bytes());
        table.resize(name_end, 0);
        table.extend(&self.extra);
        table.resize(end, 0);
    }
}

#[cfg(test)]
mod tests;
