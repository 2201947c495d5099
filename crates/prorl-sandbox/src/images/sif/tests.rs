use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    path::Path,
    process::Command,
};

use super::*;

const DEFINITION_TEXT: &str = "Bootstrap: scratch\n%labels\n  made-by hand\n";

/// Makes a SIF around bytes.
fn write(path: &Path, squashfs: &[u8], definition: Option<&str>) {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap();
    file.write_all_at(squashfs, DATA_OFFSET).unwrap();
    write_header(&file, squashfs.len() as u64, definition, None).unwrap();
}

fn recognise_bytes(bytes: &[u8]) -> Result<Packed, ImageError> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    recognise(&file, "x.sif")
}

/// A SIF, with some bytes of it replaced.
fn changed(changes: &[(usize, &[u8])]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    write(&path, &[b'q'; 5000], None);
    let mut bytes = fs::read(&path).unwrap();
    for (at, change) in changes {
        bytes[*at..*at + change.len()].copy_from_slice(change);
    }
    recognise_bytes(&bytes).unwrap_err().to_string()
}

#[test]
fn what_is_written_is_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    for definition in [None, Some(DEFINITION_TEXT), Some("")] {
        write(&path, &[b'q'; 5000], definition);
        let found = recognise(&File::open(&path).unwrap(), "x.sif").unwrap();
        assert_eq!(found, Packed::Sif { offset: DATA_OFFSET, len: 5000 });
    }
    assert_eq!(recognise_bytes(b"hsqs and more").unwrap(), Packed::Squashfs { len: 13 });
}

#[test]
fn what_cannot_be_unpacked_is_told_with_what_to_do() {
    const TABLE: usize = 4096;
    const EXTRA: usize = TABLE + 17 + 7 * 8 + 128;
    let far = (1u64 << 40).to_le_bytes();
    let other: &[u8] = if cfg!(target_arch = "x86_64") { b"04" } else { b"02" };
    for (changes, problem) in [
        (&[(0, &b"\x7fELF"[..]), (32, b"what")][..], "x.sif is neither a .sif nor a squashfs"),
        (&[(42, b"77")], "is a .sif of version \"77\", and only 01 is known"),
        (&[(88, &far)], "x.sif is damaged: its table of contents claims 1099511627776 entries at byte 4096"),
        (&[(96, &far)], "its table of contents claims 48 entries at byte 1099511627776"),
        (&[(104, &[0; 8])], "its table of contents claims 48 entries"),
        (&[(TABLE + 17, &far)], "its primary partition claims 5000 bytes at byte 1099511627776"),
        (&[(TABLE + 17, &[255; 8])], "its primary partition claims 5000 bytes"),
        (&[(TABLE + 25, &far)], "its primary partition claims 1099511627776 bytes at byte 32768"),
        (&[(TABLE + 25, &[0; 8])], "its primary partition claims 0 bytes"),
        (&[(TABLE + 4, &[0])], "is a .sif without a primary system partition"),
        (&[(EXTRA + 4, &[3])], "is a .sif without a primary system partition"),
        (&[(TABLE, &[0x0a, 0x40])], "is an OCI-SIF, which holds layers instead of a file system"),
        (&[(EXTRA, &[2])], "holds an ext3 file system instead of a squashfs; convert it by `apptainer build"),
        (&[(EXTRA, &[5])], "is encrypted; on a machine that has its key"),
        (&[(EXTRA, &[9])], "holds a file system of kind 9"),
        (&[(EXTRA + 8, other)], "processors, and this machine's is"),
    ] {
        let error = changed(changes);
        assert!(error.contains(problem), "{error:?} does not say {problem:?}");
    }
    for (bytes, problem) in [
        (&b""[..], "is neither a .sif nor a squashfs"),
        (b"sqsh", "is a squashfs of before 2009"),
        (&[&[0; 32][..], b"SIF_MAGIC\x0001\0"].concat(), "x.sif is damaged: its header ends early"),
    ] {
        let error = recognise_bytes(bytes).unwrap_err().to_string();
        assert!(error.contains(problem), "{error:?} does not say {problem:?}");
    }
}

#[test]
fn a_file_that_ends_early_is_damaged_wherever_that_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    write(&path, &[b'q'; 9000], Some(DEFINITION_TEXT));
    let bytes = fs::read(&path).unwrap();
    for len in (50..bytes.len() - DEFINITION_TEXT.len()).step_by(997) {
        let error = recognise_bytes(&bytes[..len]).unwrap_err();
        assert!(matches!(error, ImageError::Damaged { .. }), "{len}: {error:?}");
    }
    // Any byte of the header and of the first descriptor: an error or not, but no more than that.
    for at in (0..HEADER_LEN).chain(4096..4096 + DESCRIPTOR_LEN) {
        for byte in [0, 0x7f, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] = byte;
            let _either = recognise_bytes(&bytes);
        }
    }
}

#[test]
fn apptainer_takes_what_is_written() {
    let skip = |why: &str| writeln!(io::stderr(), "skipped apptainer_takes_what_is_written: {why}").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (tree, path) = (dir.path().join("tree"), dir.path().join("image.sif"));
    fs::create_dir_all(tree.join("etc")).unwrap();
    fs::write(tree.join("etc/word"), "found\n").unwrap();
    let mut pack = Command::new("mksquashfs");
    pack.arg(&tree).arg(&path).args(["-offset", &DATA_OFFSET.to_string(), "-noappend", "-quiet", "-no-progress"]);
    let Ok(done) = pack.output() else { return skip("mksquashfs is not installed") };
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let len = file.metadata().unwrap().len() - DATA_OFFSET;
    write_header(&file, len, Some(DEFINITION_TEXT), None).unwrap();
    let apptainer = |args: &[&str]| {
        let done = Command::new("apptainer").arg("sif").args(args).arg(&path).output().ok()?;
        assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
        Some(String::from_utf8_lossy(&done.stdout).into_owned())
    };
    let Some(list) = apptainer(&["list"]) else { return skip("Apptainer is not installed") };
    assert!(list.contains("FS (Squashfs/*System/") && list.contains("Def.FILE"), "{list}");
    assert_eq!(apptainer(&["dump", "2"]).unwrap(), DEFINITION_TEXT);
    let header = apptainer(&["header"]).unwrap();
    assert!(header.contains("run-singularity") && header.contains("Descriptors Free:     46"), "{header}");
    assert_eq!(recognise(&file, "x.sif").unwrap(), Packed::Sif { offset: DATA_OFFSET, len });
}
