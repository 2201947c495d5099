//! Programs that build: run below an owner, which leaves nothing of them when this process ends or loses interest.

use std::{
    env,
    ffi::{OsStr, OsString},
    io::{self, PipeReader, Read as _, Write as _, pipe},
    net::Shutdown,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{net::UnixStream, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use prorl_core::{
    frame,
    hello::{PROTOCOL, StartFailure},
};

use super::tail::Tail;
use crate::{
    images::{Cancel, ImageError},
    setup::{Order, Own, Owned, step},
};

/// How soon a cancelled build is noticed, in milliseconds.
const ATTENTION_MS: u16 = 50;

/// A program that is to be run.
pub(in crate::images) struct Program {
    /// The program and its arguments.
    pub(in crate::images) argv: Vec<OsString>,
    /// What differs from this process's environment.
    pub(in crate::images) env: Vec<(OsString, OsString)>,
    /// See [`Own::own_users`].
    pub(in crate::images) own_users: bool,
}

/// How a program has ended.
pub(in crate::images) struct Ended {
    how: Owned,
    tail: Tail,
}

impl Ended {
    /// Returns nothing when it has done what it was asked to, and else how it ended and its last words.
    pub(in crate::images) fn failure(&self) -> Option<(String, String)> {
        let how = match &self.how {
            Owned::Exited(0) => return None,
            Owned::Exited(code) => format!("ended with code {code}"),
            Owned::Killed(signal) => format!("was killed by signal {signal}"),
            Owned::Failed(StartFailure { step, target, errno }) if *errno != 0 => {
                let what = format!("{step} {target}");
                format!("did not start: failed to {}: {}", what.trim_end(), io::Error::from_raw_os_error(*errno))
            }
            Owned::Failed(_) => "ended, and how is not known".to_owned(),
        };
        Some((how, self.tail.text()))
    }

    /// Tells whether it did not get the user namespace that it needs.
    pub(in crate::images) fn is_without_users(&self) -> bool {
        matches!(&self.how, Owned::Failed(failure) if [step::NAMESPACES, step::MAP_USERS].contains(&failure.step.as_str()))
    }

    /// Tells whether it could not be executed because something of it is not there, such as an interpreter.
    pub(in crate::images) fn is_missing(&self) -> bool {
        matches!(&self.how, Owned::Failed(failure) if failure.errno == nix::libc::ENOENT)
    }
}

impl Program {
    pub(in crate::images) fn new(program: &Path) -> Self {
        Self { argv: vec![program.into()], env: Vec::new(), own_users: false }
    }

    pub(in crate::images) fn args<T: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = T>) -> Self {
        self.argv.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    pub(in crate::images) fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Runs it to its end. When this returns, however it does, no process of it is left.
    pub(in crate::images) fn run(&self, guest: &Path, cancel: &Cancel) -> Result<Ended, ImageError> {
        if cancel.is_cancelled() {
            return Err(ImageError::Cancelled);
        }
        let at = |error| ImageError::at("start owner", guest, error);
        let (mut ours, theirs) = UnixStream::pair().map_err(at)?;
        let (mut words, words_in) = pipe().map_err(at)?;
        let order = frame::encode(&Order::Own(self.order()?)).map_err(|error| at(io::Error::other(error)))?;
        let mut owner = Command::new(guest)
            .arg0("prorl-guest")
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(words_in)
            .stderr(Stdio::null())
            .spawn()
            .map_err(at)?;
        let mut tail = Tail::default();
        // One that gives up while we still write has a reason to tell.
        let _ = ours.write_all(&order);
        let told = watch(&mut ours, &mut words, &mut tail, cancel);
        drop(ours);
        let waited = owner.wait();
        let told = told.map_err(at)?;
        waited.map_err(at)?;
        tail.end();
        if cancel.is_cancelled() {
            return Err(ImageError::Cancelled);
        }
        let unknown = || Owned::Failed(StartFailure { step: String::new(), target: String::new(), errno: 0 });
        Ok(Ended { how: told.unwrap_or_else(unknown), tail })
    }

    fn order(&self) -> Result<Own, ImageError> {
        let cwd = env::current_dir().map_err(|error| ImageError::at("find", ".", error))?;
        let mut variables: Vec<(OsString, OsString)> = env::vars_os().collect();
        variables.retain(|(name, _)| self.env.iter().all(|(own, _)| own != name));
        variables.extend(self.env.iter().cloned());
        Ok(Own { protocol: PROTOCOL, argv: self.argv.clone(), env: variables, cwd, own_users: self.own_users })
    }
}

/// Listens until the owner has ended, and hangs up when nobody wants the work any more.
fn watch(
    channel: &mut UnixStream,
    words: &mut PipeReader,
    tail: &mut Tail,
    cancel: &Cancel,
) -> io::Result<Option<Owned>> {
    let mut answer = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    let (mut talks, mut has_hung_up) = (true, false);
    loop {
        if cancel.is_cancelled() && !has_hung_up {
            // Half of it: the owner's end comes by the other half.
            channel.shutdown(Shutdown::Write)?;
            has_hung_up = true;
        }
        let mut fds = vec![PollFd::new(channel.as_fd(), PollFlags::POLLIN)];
        if talks {
            fds.push(PollFd::new(words.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut fds, PollTimeout::from(ATTENTION_MS)) {
            Err(nix::errno::Errno::EINTR) | Ok(0) => continue,
            Err(error) => return Err(error.into()),
            Ok(_) => {}
        }
        let has_news = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
        let (told, said) = (has_news(&fds[0]), fds.get(1).is_some_and(has_news));
        if said {
            let n_read = words.read(&mut buffer)?;
            tail.add(&buffer[..n_read]);
            talks = n_read > 0;
        } else if told {
            // The owner tells when nobody is left to say anything, so what was said has been heard by now.
            let n_read = channel.read(&mut buffer).unwrap_or_default();
            if n_read == 0 {
                return Ok(decode(&answer));
            }
            answer.extend_from_slice(&buffer[..n_read]);
        }
    }
}

fn decode(answer: &[u8]) -> Option<Owned> {
    frame::decode(answer.get(frame::HEADER_BYTES..)?).ok()
}

/// Finds a program along `PATH` and where programs usually are.
pub(super) fn find(names: &[&str], given: Option<&Path>, advice: &str) -> Result<PathBuf, ImageError> {
    let missing = |program: String, problem: &str| ImageError::Program {
        program,
        problem: problem.to_owned(),
        advice: advice.to_owned(),
    };
    if let Some(path) = given {
        let path = std::path::absolute(path).map_err(|error| ImageError::at("find", path, error))?;
        return if path.is_file() { Ok(path) } else { Err(missing(path.display().to_string(), "is not there")) };
    }
    let search = search_path();
    let mut places = names.iter().flat_map(|name| env::split_paths(&search).map(move |folder| folder.join(name)));
    places.find(|path| path.is_file()).ok_or_else(|| missing(names.join(" or "), "is not found along PATH"))
}

/// Returns where programs are looked for.
pub(super) fn search_path() -> OsString {
    let mut search = env::var_os("PATH").unwrap_or_default();
    if !search.is_empty() {
        search.push(":");
    }
    search.push("/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin");
    search
}
