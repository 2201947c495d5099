//! Small images for the tests, made of the machine's own programs.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// A temporary folder that every user may pass through, as `/tmp` is: sandboxes of root belong to another user.
pub(crate) fn open_temp() -> tempfile::TempDir {
    let temp = tempfile::tempdir().unwrap();
    fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o755)).unwrap();
    temp
}

/// Tells whether a working Apptainer is on PATH.
pub(crate) fn has_apptainer() -> bool {
    succeeds(Command::new("apptainer").arg("--version"))
}

fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// An unpacked image with a shell and a few programs.
pub(crate) fn image() -> tempfile::TempDir {
    let image = open_temp();
    for folder in ["bin", "dev", "etc", "home", "proc", "root", "sys", "tmp", "usr/bin", "var/tmp"] {
        fs::create_dir_all(image.path().join(folder)).unwrap();
    }
    for program in ["bash", "cat", "id", "ls", "setsid", "sleep", "uname"] {
        copy_program(program, image.path());
    }
    std::os::unix::fs::symlink("bash", image.path().join("bin/sh")).unwrap();
    assert!(succeeds(Command::new("chmod").arg("-R").arg("a+rX").arg(image.path())));
    image
}

fn copy_program(program: &str, image: &Path) {
    let found = ["/bin", "/usr/bin"].iter().map(|folder| Path::new(folder).join(program)).find(|path| path.exists());
    let found = found.unwrap_or_else(|| panic!("{program} is on every machine"));
    fs::copy(&found, image.join("bin").join(program)).unwrap();
    let libraries = Command::new("ldd").arg(&found).output().unwrap();
    for word in String::from_utf8(libraries.stdout).unwrap().split_whitespace().filter(|word| word.starts_with('/')) {
        let target = image.join(&word[1..]);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(word, target).unwrap();
    }
}

/// A packed image.
pub(crate) struct Packed {
    _folder: tempfile::TempDir,
    file: PathBuf,
}

impl Packed {
    pub(crate) fn path(&self) -> &Path {
        &self.file
    }
}

/// The same image as a squashfs file; none where it cannot be made, or mounted by this user.
pub(crate) fn packed_image() -> Option<Packed> {
    let has_fuse = fs::File::options().read(true).write(true).open("/dev/fuse").is_ok();
    let image = image();
    let folder = open_temp();
    let file = folder.path().join("image.sqfs");
    let mut pack = Command::new("mksquashfs");
    pack.arg(image.path()).arg(&file).args(["-all-root", "-comp", "zstd", "-Xcompression-level", "1", "-quiet"]);
    (has_fuse && succeeds(&mut pack)).then_some(Packed { _folder: folder, file })
}
