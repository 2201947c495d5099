//! The owner of a program: the process that runs it for the host and leaves nothing of it, whatever becomes of the host.
//!
//! A program such as a builder of images starts others, in sessions of their own too, and they outlive it when it is killed. So
//! the owner is the reaper of them all. It waits for the program's end or the channel's, whichever comes first; then it ends
//! what is left, tells how the program has ended, and ends last. What the program says goes to the owner's standard output,
//! whose reader sees the end of it when nobody is left to write.

use std::{
    fs,
    io::{self, Write as _},
    os::fd::{AsFd as _, OwnedFd},
    process::{self, Command, Stdio},
    time::Duration,
};

use nix::{
    sched::{CloneFlags, unshare},
    sys::{
        prctl::{set_child_subreaper, set_dumpable, set_name},
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Gid, Pid, Uid, chdir, pipe, read, setresgid, setresuid, setsid, write},
};
use prorl_core::{frame, hello::StartFailure};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{PidfdFlags, pidfd_open},
};

use super::{
    At,
    clock::Clock,
    launch::{children, end_rest},
    stream,
};
use crate::{
    setup::{Own, Owned, step},
    sys::{self, Fork},
};

/// The step of starting the program.
const EXECUTE: &str = "execute program";

/// How long a program may take to clean up when it was asked to end: a builder removes a tree, of which nobody else may remove
/// what belongs to a fake root's other ids.
const ASKED: Duration = Duration::from_secs(10);

/// How long what a program has left may take to end by itself, and then to do so when asked.
const LEFT: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(500)];

/// How many ids the first line has of a map of every id.
const SHORT_LINE: u32 = 1 << 16;

/// How often orphans that have ended are reaped while the program runs.
const REAP: Duration = Duration::from_millis(500);

/// Runs a program, tells the host how it has ended, and ends this process, when nothing of the program is left.
pub fn own(channel: &OwnedFd, order: &Own) -> ! {
    let told = match run(channel, order) {
        Ok(ended) => ended,
        Err(failure) => Owned::Failed(failure),
    };
    let sent =
        frame::encode(&told).map_err(io::Error::other).and_then(|bytes| stream(channel)?.write_all(&bytes)).is_ok();
    process::exit(i32::from(!sent))
}

fn run(channel: &OwnedFd, order: &Own) -> Result<Owned, StartFailure> {
    sys::close_all_but(channel.as_fd()).at("close descriptors", "")?;
    set_name(c"prorl-owner").at("set name", "")?;
    setsid().at("lead a session", "")?;
    if order.own_users {
        make_users()?;
    }
    set_dumpable(false).at("become undumpable", "")?;
    set_child_subreaper(true).at("adopt orphans", "")?;
    sys::reset_signals().at("reset signals", "")?;
    chdir(&order.cwd).at("enter", &order.cwd.to_string_lossy())?;
    let program = spawn(order)?;
    let mut owner = Owner { channel, program, status: None };
    let is_asked = owner.wait();
    owner.wind_up(is_asked);
    Ok(match owner.status {
        Some(WaitStatus::Exited(_, code)) => Owned::Exited(code),
        Some(WaitStatus::Signaled(_, signal, _)) => Owned::Killed(signal as i32),
        _ => Owned::Failed(StartFailure { step: EXECUTE.to_owned(), target: String::new(), errno: 0 }),
    })
}

/// Starts the program. This process keeps no end of the pipe that it writes to.
fn spawn(order: &Own) -> Result<Pid, StartFailure> {
    let name = order.argv.first().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let Some((program, args)) = order.argv.split_first() else {
        return Err(Errno::INVAL).at(EXECUTE, "");
    };
    let mut command = Command::new(program);
    let output = io::stdout().as_fd().try_clone_to_owned().at(EXECUTE, &name)?;
    let errors = output.try_clone().at(EXECUTE, &name)?;
    command
        .args(args)
        .env_clear()
        .envs(order.env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors);
    let spawned = command.spawn();
    drop(command);
    let null = fs::File::options().write(true).open("/dev/null").at("open", "/dev/null")?;
    nix::unistd::dup2_stdout(null).at("let go of standard output", "")?;
    let child = spawned.at(EXECUTE, &name)?;
    Ok(Pid::from_raw(i32::try_from(child.id()).unwrap_or_default()))
}

struct Owner<'a> {
    channel: &'a OwnedFd,
    program: Pid,
    /// How the program has ended, once it has.
    status: Option<WaitStatus>,
}

impl Owner<'_> {
    /// Waits for the program's end or the host's; tells whether it was the host's.
    fn wait(&mut self) -> bool {
        // The number is the program's until it is reaped, which only `reap` does.
        let handle = rustix::process::Pid::from_raw(self.program.as_raw());
        let handle = handle.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        loop {
            self.reap();
            if self.status.is_some() {
                return false;
            }
            let clock = Clock::start(REAP);
            // The host sends nothing more: anything on the channel means that it has gone or has had enough.
            let mut fds = vec![PollFd::new(self.channel, PollFlags::IN | PollFlags::RDHUP)];
            fds.extend(handle.iter().map(|handle| PollFd::new(handle, PollFlags::IN)));
            let polled = poll(&mut fds, Some(&clock.timespec()));
            if polled.is_ok() && !fds[0].revents().is_empty() {
                return true;
            }
        }
    }

    /// Reaps what has ended; tells whether no child is left.
    fn reap(&mut self) -> bool {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Err(nix::errno::Errno::ECHILD) => return true,
                Ok(WaitStatus::StillAlive) => return false,
                Ok(status) if status.pid() == Some(self.program) => self.status = Some(status),
                Ok(_) | Err(_) => {}
            }
        }
    }

    /// Ends the program, if `is_asked`, and everything that it has left.
    fn wind_up(&mut self, is_asked: bool) {
        if is_asked && self.status.is_none() {
            let _ = kill(self.program, Signal::SIGTERM);
            let clock = Clock::start(ASKED);
            while self.status.is_none() && !clock.is_over() {
                self.children_end(LEFT[0]);
            }
        }
        end_rest(LEFT, |patience| self.children_end(patience));
    }

    /// Waits until no child is left, or for so long; tells which.
    fn children_end(&mut self, patience: Duration) -> bool {
        let clock = Clock::start(patience);
        loop {
            if self.reap() {
                return true;
            }
            if clock.is_over() {
                return false;
            }
            let pids = children().into_iter().filter_map(|pid| rustix::process::Pid::from_raw(pid.as_raw()));
            let handles: Vec<OwnedFd> = pids.filter_map(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()).collect();
            let mut fds: Vec<_> = handles.iter().map(|handle| PollFd::new(handle, PollFlags::IN)).collect();
            let _ = poll(&mut fds, Some(&clock.timespec()));
        }
    }
}

/// Makes a user namespace in which every id that there is here has its own number, and a mount namespace that belongs to it.
/// Root has every capability there, also those that the machine withholds from it outside.
///
/// The map has more than one line or id, so that only somebody outside may write it: a child that stays there.
fn make_users() -> Result<(), StartFailure> {
    let maps = ["uid_map", "gid_map"].map(|name| {
        let path = format!("/proc/self/{name}");
        fs::read_to_string(&path).at(step::MAP_USERS, &path).map(|text| (name, same_ids(&text)))
    });
    let (ready_in, ready_out) = pipe().at("make pipe", "")?;
    let parent = process::id();
    match sys::fork().at("fork helper", "")? {
        Fork::Child => {
            drop(ready_out);
            // A parent that ends early closes its end as well; then there is nothing to write to.
            let is_ready = read(&ready_in, &mut [0]) == Ok(1);
            let is_written = is_ready
                && maps
                    .into_iter()
                    .all(|map| map.is_ok_and(|(name, text)| fs::write(format!("/proc/{parent}/{name}"), text).is_ok()));
            process::exit(i32::from(!is_written))
        }
        Fork::Parent(helper) => {
            drop(ready_in);
            let made = unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS);
            if made.is_ok() {
                write(&ready_out, &[1]).at(step::MAP_USERS, "helper")?;
            }
            drop(ready_out);
            let status = loop {
                match waitpid(helper, None) {
                    Err(nix::errno::Errno::EINTR) => {}
                    ended => break ended,
                }
            };
            made.at(step::NAMESPACES, "")?;
            if status != Ok(WaitStatus::Exited(helper, 0)) {
                return Err(Errno::PERM).at(step::MAP_USERS, "the same ids");
            }
        }
    }
    let (root, group) = (Uid::from_raw(0), Gid::from_raw(0));
    setresgid(group, group, group).at(step::MAP_USERS, "0")?;
    setresuid(root, root, root).at(step::MAP_USERS, "0")
}

/// Returns the map that shows each id of a map under its own number.
///
/// One line that maps every id would be that of the machine's first user namespace, which programs take this for then. So it
/// becomes two.
fn same_ids(map: &str) -> String {
    let same = |line: &str| {
        let numbers: Vec<u32> = line.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        match numbers[..] {
            [0, _, u32::MAX] => format!("0 0 {SHORT_LINE}\n{SHORT_LINE} {SHORT_LINE} {}\n", u32::MAX - SHORT_LINE),
            [first, _outside, count] => format!("{first} {first} {count}\n"),
            _ => String::new(),
        }
    };
    map.lines().map(same).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_of_the_same_ids_keeps_every_range() {
        let all = "0 0 65536\n65536 65536 4294901759\n";
        assert_eq!(same_ids("         0          0 4294967295\n"), all);
        assert_eq!(same_ids(all), all);
        assert_eq!(same_ids("0 1000 1\n1 100000 65536\n"), "0 0 1\n1 1 65536\n");
        assert_eq!(same_ids(""), "");
    }
}
