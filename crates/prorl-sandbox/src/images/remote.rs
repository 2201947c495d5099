//! Fetching images of registries, which Apptainer does: it knows how to log in, and what the registries of a site are.

use std::{
    env,
    fs::{self, File},
    io::{self, Read as _, Seek as _, SeekFrom},
    os::{
        fd::AsFd as _,
        unix::{fs::PermissionsExt as _, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};

use super::{Cancel, ImageError, build::run::Program};

/// The names that are looked for, in this order.
const NAMES: [&str; 2] = ["apptainer", "singularity"];

/// How often it is asked whether somebody still waits, in milliseconds.
const ASK_MILLIS: u16 = 50;

/// How much of its last words is read, in bytes.
const LAST_WORDS: u64 = 2000;

/// How many lines of them are passed on.
const LAST_LINES: usize = 6;

/// One image to be fetched.
pub(super) struct Pull<'a> {
    /// As it was written.
    pub(super) image: &'a str,
    /// What the registry calls it.
    pub(super) reference: &'a str,
    pub(super) program: Option<&'a Path>,
    /// The guest's program, below which it runs: then nothing is left of it when this process is killed.
    pub(super) guest: Option<&'a Path>,
    pub(super) no_https: bool,
    /// A folder for all that it writes, which is made, and is the caller's to remove.
    pub(super) folder: &'a Path,
}

impl Pull<'_> {
    /// Fetches it into a `.sif`, and returns where that is.
    pub(super) fn run(&self, cancel: &Cancel) -> Result<PathBuf, ImageError> {
        let program = match self.program {
            Some(program) => program.to_owned(),
            None => {
                look_for().ok_or_else(|| self.failed(&NAMES.join(" or "), "was not found along PATH".to_owned()))?
            }
        };
        let (cache, tmp) = (self.folder.join("cache"), self.folder.join("tmp"));
        for folder in [self.folder, &cache, &tmp] {
            fs::create_dir(folder).map_err(|error| ImageError::at("make folder", folder, error))?;
        }
        let sif = self.folder.join("image.sif");
        let mut fetch = Program::new(&program).args(["build", "--force"]);
        if program.file_name().is_some_and(|name| name == NAMES[0]) {
            // It is unpacked at once: packing it well would be wasted.
            fetch = fetch.args(["--mksquashfs-args", "-comp zstd -Xcompression-level 1"]);
        }
        if self.no_https {
            fetch = fetch.args(["--no-https"]);
        }
        fetch = fetch.args([&sif]).args([format!("docker://{}", self.reference)]);
        // The rest of the environment stays: proxies and credentials are in it, or in the home that it names.
        for prefix in ["APPTAINER", "SINGULARITY"] {
            fetch = fetch.env(&format!("{prefix}_CACHEDIR"), &cache).env(&format!("{prefix}_TMPDIR"), &tmp);
        }
        fetch = fetch.env("TMPDIR", &tmp);
        let failure = match self.guest {
            Some(guest) => fetch.run(guest, cancel)?.failure(),
            None => self.run_alone(&fetch, &tmp, cancel)?,
        };
        let Some((how, words)) = failure else { return Ok(sif) };
        let said = one_line(&words);
        Err(self.failed(&program.display().to_string(), format!("could not fetch it ({how}): {said}")))
    }

    /// Runs it where there is no guest. It goes on when this process is killed.
    ///
    /// Returns nothing when it has done what it was asked to, and else how it ended and its last words.
    fn run_alone(
        &self,
        fetch: &Program,
        folder: &Path,
        cancel: &Cancel,
    ) -> Result<Option<(String, String)>, ImageError> {
        let words_path = self.folder.join("words");
        let words = || File::options().append(true).create(true).open(&words_path);
        let at = |error| ImageError::at("write", &words_path, error);
        let (program, args) = fetch.argv.split_first().expect("a program has a name");
        let mut command = Command::new(program);
        command.args(args).envs(fetch.env.iter().map(|(name, value)| (name, value)));
        command.current_dir(folder).process_group(0);
        command.stdin(Stdio::null()).stdout(words().map_err(at)?).stderr(words().map_err(at)?);
        let name = program.display().to_string();
        let child = command.spawn().map_err(|error| self.failed(&name, format!("cannot be started: {error}")))?;
        let status = Running { child }.wait(cancel).map_err(|error| ImageError::at("wait for", program, error))?;
        match status {
            None => Err(ImageError::Cancelled),
            Some(status) if status.success() => Ok(None),
            Some(status) => Ok(Some((status.to_string(), last_words(&words_path)))),
        }
    }

    fn failed(&self, program: &str, problem: String) -> ImageError {
        let advice = format!(
            "where there is no network or no Apptainer, fetch it on another machine (apptainer pull image.sif docker://{}), \
             copy the .sif here and name that instead of {}",
            self.reference, self.image
        );
        ImageError::Program { program: program.to_owned(), problem, advice }
    }
}

/// A program that leads a group of its own. Dropped, it is ended with all that it has started.
struct Running {
    child: Child,
}

impl Running {
    /// Waits for its end, or returns nothing when it was cancelled.
    fn wait(mut self, cancel: &Cancel) -> io::Result<Option<ExitStatus>> {
        let pid = self.pid()?;
        let ended = pidfd_open(pid, PidfdFlags::empty())?;
        while !cancel.is_cancelled() {
            match poll(&mut [PollFd::new(ended.as_fd(), PollFlags::POLLIN)], PollTimeout::from(ASK_MILLIS)) {
                Ok(0) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_ended) => {
                    // What it has left in its group ends with it; only then its number may come to mean another.
                    self.kill();
                    return self.child.wait().map(Some);
                }
            }
        }
        Ok(None)
    }

    fn pid(&self) -> io::Result<Pid> {
        let raw = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        raw.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Ends the group, and what has left it but is still a descendant.
    fn kill(&self) {
        let Ok(pid) = self.pid() else { return };
        // Handles first: once its parent is dead, nobody can tell whose descendant something was.
        let descendants: Vec<_> = descendants(self.child.id())
            .into_iter()
            .filter_map(|pid| pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok())
            .collect();
        // A group that is empty by now, and programs that have ended, mind no signal.
        let _ = kill_process_group(pid, Signal::KILL);
        for descendant in descendants {
            let _ = pidfd_send_signal(descendant, Signal::KILL);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // One that was waited for is not signalled: its number may be another's.
        if let Ok(None) = self.child.try_wait() {
            self.kill();
            let _ = self.child.wait();
        }
    }
}

/// Numbers of all that a process has started, and what those have.
fn descendants(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut left = vec![pid];
    while let Some(pid) = left.pop() {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().filter_map(Result::ok);
        for thread in threads {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            let children: Vec<u32> = children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
            left.extend(&children);
            found.extend(children);
        }
    }
    found
}

fn look_for() -> Option<PathBuf> {
    let search = env::var_os("PATH")?;
    let is_program =
        |path: &PathBuf| path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
    let folders: Vec<PathBuf> = env::split_paths(&search).filter(|folder| folder.is_absolute()).collect();
    NAMES.iter().find_map(|name| folders.iter().map(|folder| folder.join(name)).find(is_program))
}

/// Returns the end of what it has said. Where that cannot be read it is nothing.
fn last_words(path: &Path) -> String {
    let mut words = Vec::new();
    let read = File::open(path).and_then(|mut file| {
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(LAST_WORDS)))?;
        file.take(LAST_WORDS).read_to_end(&mut words)
    });
    read.map_or_else(|_unreadable| String::new(), |_len| String::from_utf8_lossy(&words).into_owned())
}

/// Returns the last lines on one.
fn one_line(words: &str) -> String {
    let lines: Vec<&str> = words.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    match lines.as_slice() {
        [] => "it said nothing".to_owned(),
        lines => lines[lines.len().saturating_sub(LAST_LINES)..].join(" | "),
    }
}
