//! Where implementations of others run: on this machine, in a folder of their own, and marked so that nothing of them is left.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Component, Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use nix::{
    poll::poll,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::process::Command;

use super::{
    case::{Content, File},
    run::Found,
};

/// The variable that marks what belongs to a session.
const MARK: &str = "PRORL_CONFORMANCE_SESSION";

/// How often it is looked for processes that are not gone yet, or that were started while others were killed.
const ROUNDS: usize = 400;

/// What a killed process may take to be gone, before it is looked for again, in milliseconds.
const PAUSE_MS: u8 = 5;

/// A session's folder, and all that was started in it: both are gone once this is dropped.
#[derive(Debug)]
pub(super) struct Ground {
    folder: TempDir,
    path: String,
    word: String,
}

impl Ground {
    pub(super) fn make() -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let folder = tempfile::Builder::new().prefix("prorl-conformance-").tempdir()?;
        let path = folder.path().canonicalize()?.to_string_lossy().into_owned();
        let word = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Ok(Self { folder, path, word })
    }

    /// Returns its path, without links.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Returns a program that works here, leads a process group, and is killed when it is dropped.
    pub(super) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.path).env(MARK, &self.word).process_group(0).kill_on_drop(true);
        command
    }

    pub(super) fn put(&self, file: &File) -> Result<(), String> {
        let put = || -> io::Result<()> {
            let path = self.inside(&file.path)?;
            fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
            match &file.content {
                Content::Bytes(bytes) => fs::write(&path, bytes)?,
                Content::Link(target) => symlink(target, &path)?,
                Content::Folder => fs::create_dir_all(&path)?,
                Content::Absent => fs::remove_file(&path)?,
            }
            file.mode.map_or(Ok(()), |mode| fs::set_permissions(&path, Permissions::from_mode(mode)))
        };
        put().map_err(|err| err.to_string())
    }

    pub(super) fn look(&self, path: &str) -> Result<Found, String> {
        let look = || -> io::Result<Found> {
            let path = self.inside(path)?;
            let about = match fs::symlink_metadata(&path) {
                Err(err) if err.kind() == io::ErrorKind::NotFound => {
                    return Ok(Found { content: Content::Absent, mode: 0 });
                }
                about => about?,
            };
            let content = if about.is_symlink() {
                Content::Link(fs::read_link(&path)?.to_string_lossy().into_owned())
            } else if about.is_dir() {
                Content::Folder
            } else {
                Content::Bytes(fs::read(&path)?)
            };
            Ok(Found { content, mode: about.permissions().mode() & 0o7777 })
        };
        look().map_err(|err| format!("{path}: {err}"))
    }

    /// Returns a path of the folder, and of nothing outside of it.
    fn inside(&self, path: &str) -> io::Result<PathBuf> {
        let is_plain = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
        if is_plain { Ok(self.folder.path().join(path)) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    /// Ends it where that holds up no other session: all processes of the machine are looked at.
    pub(super) async fn close(self) {
        let _ended = tokio::task::spawn_blocking(move || drop(self)).await;
    }

    /// Kills what has the mark, whatever has become of its parents and groups.
    fn end(&self) {
        let mark = format!("{MARK}={}", self.word);
        for _round in 0..ROUNDS {
            let marked = marked(mark.as_bytes());
            if marked.is_empty() {
                return;
            }
            for pid in marked {
                let _sent = kill(pid, Signal::SIGKILL);
            }
            // Whatever it is, it is no child that could be waited for.
            let _passed = poll(&mut [], PAUSE_MS);
        }
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns the living processes that have a variable.
fn marked(mark: &[u8]) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    // One that has ended has no variables any more.
    let has = |pid: &i32| {
        fs::read(format!("/proc/{pid}/environ")).is_ok_and(|text| text.split(|byte| *byte == 0).any(|one| one == mark))
    };
    pids.filter(has).map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_is_left_of_what_was_started() {
        let ground = Ground::make().unwrap();
        let mark = format!("{MARK}={}", ground.word);
        // It leaves the group and its parent.
        let mut command = ground.command("sh");
        let started = command.args(["-c", "setsid sleep 1000 & echo up"]).stdout(std::process::Stdio::piped());
        let mut child = started.spawn().unwrap();
        let mut said = tokio::io::BufReader::new(child.stdout.take().unwrap());
        tokio::io::AsyncBufReadExt::read_line(&mut said, &mut String::new()).await.unwrap();
        child.wait().await.unwrap();
        assert_eq!(marked(mark.as_bytes()).len(), 1);
        let path = ground.path.clone();
        drop(ground);
        assert!(marked(mark.as_bytes()).is_empty() && !Path::new(&path).exists());
    }

    #[test]
    fn files_are_found_as_they_were_put() {
        let ground = Ground::make().unwrap();
        let file = |path: &str, content, mode| File { path: path.to_owned(), content, mode };
        for file in [
            file("a/b", Content::Bytes(vec![0, 255]), Some(0o751)),
            file("link", Content::Link("a/b".to_owned()), None),
            file("folder", Content::Folder, None),
        ] {
            ground.put(&file).unwrap();
            let found = ground.look(&file.path).unwrap();
            assert_eq!(found.content, file.content);
            assert!(file.mode.is_none_or(|mode| mode == found.mode));
        }
        assert_eq!(ground.look("none").unwrap().content, Content::Absent);
        assert!(ground.look("../etc").is_err() && ground.look("/etc/passwd").is_err());
    }
}
