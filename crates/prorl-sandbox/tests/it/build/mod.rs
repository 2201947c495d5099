//! Building images for real: what comes of it, what is left of it, and when it is not done.

mod ending;
mod images;
mod modes;
mod together;

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::LazyLock,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use prorl_guest::Guest;
use prorl_sandbox::images::{
    BuildRequest, BuilderConfig, Built, CacheMode, Cancel, Definition, ImageBuilder, ImageError, Quiet,
};
use serde_json::Map;
use tempfile::TempDir;

use crate::support::{is_root, skip};

static GUEST: LazyLock<Guest> = LazyLock::new(|| Guest::install().unwrap());

/// A builder with folders of its own: one for outputs and one for its state.
struct Bench {
    folder: TempDir,
    builder: ImageBuilder,
}

impl Bench {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut BuilderConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("out")).unwrap();
        let mut config = BuilderConfig::new(GUEST.path(), folder.path().join("state"));
        change(&mut config);
        Self { builder: ImageBuilder::new(config).unwrap(), folder }
    }

    /// Returns nothing, and says so, where a program is missing that the test needs.
    fn if_there(test: &str, programs: &[&str]) -> Option<Self> {
        are_there(test, programs).then(Self::new)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn output(&self) -> PathBuf {
        self.path("out/image.sif")
    }

    fn request(&self, text: &str) -> BuildRequest {
        request(text, self.output())
    }

    fn build(&self, request: &BuildRequest) -> Result<Built, ImageError> {
        self.builder.build(request, &Cancel::default(), &Quiet)
    }

    /// Builds, and returns what was said about it.
    fn reason(&self, request: &BuildRequest) -> String {
        let built = self.build(request).unwrap_or_else(|error| panic!("{error}: {error:?}"));
        assert_eq!(built.reused, built.reason.starts_with("reused: "), "{}", built.reason);
        assert_eq!(built.path, self.output().canonicalize().unwrap());
        built.reason
    }

    /// Asserts that nothing temporary is left, and returns the names of the outputs.
    fn outputs(&self) -> Vec<String> {
        assert_eq!(names(&self.path("state/trees")), Vec::<String>::new());
        assert_eq!(names(&self.path("state/claims")), Vec::<String>::new());
        names(&self.path("out"))
    }

    /// An unpacked image that needs no program to be made of: a file and a folder.
    fn base(&self) -> PathBuf {
        let base = self.path("base");
        fs::create_dir_all(base.join("etc")).unwrap();
        fs::write(base.join("etc/settings"), "of the base\n").unwrap();
        base
    }

    /// A definition of that image and nothing else.
    fn plain(&self) -> BuildRequest {
        self.request(&format!("Bootstrap: localimage\nFrom: {}\n", self.base().display()))
    }

    /// A definition whose build runs a script on this machine.
    fn with_script(&self, script: &str) -> BuildRequest {
        request(&with_script(script), self.output())
    }

    /// Makes a pipe with a name.
    fn fifo(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        path
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn are_there(test: &str, programs: &[&str]) -> bool {
    for program in programs {
        let found = Command::new("sh").args(["-c", "command -v \"$1\"", "sh", program]).output().unwrap();
        if !found.status.success() {
            skip(test, &format!("no {program} here"));
            return false;
        }
    }
    true
}

/// Has Apptainer do something with an image; `action` may have flags.
fn apptainer(action: &str, image: &Path, args: &[&str]) -> Output {
    let mut command = Command::new("apptainer");
    command.arg("--quiet").args(action.split(' '));
    // Root of this machine may lack what Apptainer asks for.
    if is_root() && ["exec", "run"].contains(&action) {
        command.arg("--userns");
    }
    command.arg(image).args(args).current_dir("/").output().unwrap()
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Returns a builder of a process beside the test's, with the test's folders.
fn beside(folder: &Path) -> ImageBuilder {
    ImageBuilder::new(BuilderConfig::new(GUEST.path(), folder.join("state"))).unwrap()
}

fn request(text: &str, output: PathBuf) -> BuildRequest {
    BuildRequest {
        definition: Definition::Text { name: "test.def".to_owned(), text: text.to_owned() },
        variables: Map::new(),
        output,
        mode: CacheMode::Scratch,
        locks: Vec::new(),
    }
}

fn with_script(script: &str) -> String {
    format!("Bootstrap: scratch\n\n%setup\n{script}\n")
}

/// The reading end of a pipe that a script holds open, and everything that it starts. Their numbers mean nothing: a script may
/// run in a pid namespace of its own.
struct Held(File);

impl Held {
    /// Waits until a script holds the pipe and has written a line into it.
    fn wait(fifo: &Path) -> Self {
        let mut file = File::open(fifo).unwrap();
        let mut byte = [0];
        while file.read(&mut byte).unwrap() == 1 && byte != *b"\n" {}
        assert_eq!(byte, *b"\n");
        Self(file)
    }

    /// Blocks until nobody holds it any more; tells whether that came within five seconds.
    fn ends(&mut self) -> bool {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::from(5000_u16)).unwrap() == 1 && self.0.read(&mut [0]).unwrap() == 0
    }
}

/// Lets a script go on that reads from a pipe.
fn release(fifo: &Path) {
    File::options().write(true).open(fifo).unwrap().write_all(b"\n").unwrap();
}
