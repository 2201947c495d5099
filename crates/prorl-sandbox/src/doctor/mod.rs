//! What a machine allows, found by trying, and what to do about the rest.
//!
//! ```no_run
//! use prorl_sandbox::doctor::{Config, State, examine};
//!
//! let report = examine(&Config::new("/opt/prorl/guest"));
//! for check in report.checks.iter().filter(|check| check.state != State::Ok) {
//!     println!("{}: {} {:?}", check.name, check.found, check.remedy);
//! }
//! assert!(report.can_run());
//! ```

mod advice;
mod folders;
mod kernel;
mod machine;
mod programs;
mod trial;

use std::{
    io,
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use serde::Serialize;
use tokio::time::Instant;

use self::trial::Machine;
use crate::{NodeConfig, SandboxUser};

/// How long a check may take that only looks.
const LOOK: Duration = Duration::from_secs(5);

/// How long a check may take that starts something.
const TRY: Duration = Duration::from_secs(30);

/// How long all of them may take together. When that is over, each gets the moment that a plain look takes.
const ALL: Duration = Duration::from_mins(1);

/// See [`ALL`].
const MOMENT: Duration = Duration::from_secs(1);

/// The checks that start a sandbox of each runtime.
const RUNTIMES: [&str; 2] = ["namespace_runtime", "singularity_runtime"];

/// What is examined.
#[derive(Clone, Debug)]
pub struct Config {
    /// The guest's static program, as a path that the calling process can execute, or why there is none, which every check that
    /// would start it tells then.
    pub guest: Result<PathBuf, Arc<io::Error>>,
    /// The folder for what this machine's processes own together; see [`NodeConfig`].
    pub run_dir: PathBuf,
    /// The folder for temporary files.
    pub temp_dir: PathBuf,
    /// Where programs are looked for, in this order.
    pub search: Vec<PathBuf>,
    /// Apptainer's or Singularity's program; looked for by these names where none is given.
    pub launcher: Option<PathBuf>,
    /// The host user that sandboxes run as when they are started by root; `nobody` by default.
    pub sandbox_user: Option<SandboxUser>,
}

impl Config {
    /// The usual folders, and programs in the usual places.
    pub fn new(guest: impl Into<PathBuf>) -> Self {
        let guest = guest.into();
        Self {
            run_dir: NodeConfig::new(&guest).dir,
            guest: Ok(guest),
            temp_dir: std::env::temp_dir(),
            search: ["/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin"]
                .map(PathBuf::from)
                .into(),
            launcher: None,
            sandbox_user: None,
        }
    }
}

/// How a thing stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// As it should be.
    Ok,
    /// Something works less well, or not for everyone.
    Warn,
    /// Something does not work.
    Bad,
    /// It is not here, and not everybody needs it.
    Absent,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Its name: lowercase words joined by `_`, the same on every machine.
    pub name: String,
    /// How it stands.
    pub state: State,
    /// What was found, such as a version or a limit.
    pub found: String,
    /// What it is for, or what does not work without it.
    pub meaning: String,
    /// What somebody can do about it; nothing where nothing needs to be done.
    pub remedy: Option<String>,
}

/// Everything that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Always the same checks in the same order.
    pub checks: Vec<Check>,
}

impl Report {
    /// Returns a check by its name.
    pub fn check(&self, name: &str) -> Option<&Check> {
        self.checks.iter().find(|check| check.name == name)
    }

    /// Tells whether some runtime works here.
    pub fn can_run(&self) -> bool {
        RUNTIMES.iter().filter_map(|name| self.check(name)).any(|check| matches!(check.state, State::Ok | State::Warn))
    }
}

/// What one check says.
struct Finding {
    state: State,
    found: String,
    meaning: String,
    remedy: Option<String>,
}

impl Finding {
    fn ok(found: impl Into<String>, meaning: impl Into<String>) -> Self {
        Self { state: State::Ok, found: found.into(), meaning: meaning.into(), remedy: None }
    }

    fn not(
        state: State,
        found: impl Into<String>,
        meaning: impl Into<String>,
        remedy: impl Into<Option<String>>,
    ) -> Self {
        Self { state, found: found.into(), meaning: meaning.into(), remedy: remedy.into() }
    }

    fn warn(found: impl Into<String>, meaning: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::not(State::Warn, found, meaning, remedy.into())
    }

    fn bad(found: impl Into<String>, meaning: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::not(State::Bad, found, meaning, remedy.into())
    }

    fn absent(found: impl Into<String>, meaning: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::not(State::Absent, found, meaning, remedy.into())
    }
}

/// One check before it is made.
struct Look {
    name: String,
    limit: Duration,
    examine: Box<dyn Fn(&Machine) -> Finding + Send + Sync>,
}

/// Every check, in the order of the report.
fn looks() -> Vec<Look> {
    let mut all = Vec::new();
    let mut add = |name: &str, limit, examine| all.push(Look { name: name.to_owned(), limit, examine });
    let [namespace, singularity] = RUNTIMES;
    add(namespace, TRY, Box::new(trial::namespace_runtime));
    add(singularity, TRY, Box::new(trial::singularity_runtime));
    add("kernel", LOOK, Box::new(|_| kernel::version()));
    for kind in kernel::NAMESPACES {
        add(&format!("max_{kind}_namespaces"), LOOK, Box::new(move |_| kernel::namespace_limit(kind)));
    }
    add("unprivileged_userns_clone", LOOK, Box::new(|_| kernel::userns_clone()));
    add("apparmor", LOOK, Box::new(|_| kernel::apparmor()));
    add("masked_proc", LOOK, Box::new(|_| kernel::masked_proc()));
    add("hidden_processes", LOOK, Box::new(|_| kernel::hidden_processes()));
    add("seccomp", LOOK, Box::new(|_| kernel::seccomp()));
    add("landlock", LOOK, Box::new(|_| kernel::landlock()));
    add("overlay", TRY, Box::new(trial::overlay));
    add("apptainer", TRY, Box::new(|machine| programs::apptainer(&machine.config)));
    add("fuse", LOOK, Box::new(|_| programs::fuse()));
    add("squashfuse", LOOK, Box::new(|machine| programs::squashfuse(&machine.config)));
    add("fuse_overlayfs", LOOK, Box::new(|machine| programs::fuse_overlayfs(&machine.config)));
    add("subuid", LOOK, Box::new(|machine| programs::subuid(&machine.config)));
    add("subgid", LOOK, Box::new(|machine| programs::subgid(&machine.config)));
    add("newuidmap", LOOK, Box::new(|_| programs::newuidmap()));
    add("fake_root", TRY, Box::new(trial::fake_root));
    add("python", TRY, Box::new(trial::python));
    add("limits", LOOK, Box::new(|_| machine::limits()));
    add("idle_scheduling", LOOK, Box::new(|_| machine::idle_scheduling()));
    add("memory", LOOK, Box::new(|_| machine::memory()));
    add("kvm", LOOK, Box::new(|_| machine::kvm()));
    add("open_files", LOOK, Box::new(|_| machine::open_files()));
    add("processes", LOOK, Box::new(|_| machine::processes()));
    add("locked_memory", LOOK, Box::new(|_| machine::locked_memory()));
    add("address_space", LOOK, Box::new(|_| machine::address_space()));
    add("file_size", LOOK, Box::new(|_| machine::file_size()));
    add("temp_dir", LOOK, Box::new(|machine| folders::temp_dir(&machine.config)));
    add("run_dir", LOOK, Box::new(|machine| folders::run_dir(&machine.config)));
    add("loopback", LOOK, Box::new(|_| machine::loopback()));
    all
}

/// A thread that looks at one thing after the other. Whoever is late is left to itself, and ends when it has looked.
struct Looker {
    findings: Receiver<Finding>,
    thread: JoinHandle<()>,
}

impl Looker {
    fn start(looks: &Arc<Vec<Look>>, machine: &Arc<Machine>, first_idx: usize) -> io::Result<Self> {
        let (done, findings) = mpsc::channel();
        let (looks, machine) = (Arc::clone(looks), Arc::clone(machine));
        let thread = thread::Builder::new().name("doctor".to_owned()).spawn(move || {
            for look in &looks[first_idx..] {
                // Nobody waits for one that was late.
                if done.send((look.examine)(&machine)).is_err() {
                    break;
                }
            }
        })?;
        Ok(Self { findings, thread })
    }
}

/// Examines this machine as the calling process's user sees it. Takes about a second and leaves nothing behind.
///
/// Blocks, so an async caller makes a place for blocking work. Every check has a limit of time; one that passes it, such as a
/// look at a network file system that does not answer, is reported so, and its thread is left to itself. Where no thread can
/// be started, the calling one looks, without limits. A process that is to outlive its own limit of file sizes handles SIGXFSZ.
pub fn examine(config: &Config) -> Report {
    make(looks(), config)
}

fn make(looks: Vec<Look>, config: &Config) -> Report {
    let begun = Instant::now();
    let (looks, machine) = (Arc::new(looks), Arc::new(Machine::new(config.clone())));
    let mut looker: Option<Looker> = None;
    let mut checks = Vec::new();
    for (look_idx, look) in looks.iter().enumerate() {
        let limit = look.limit.min(ALL.saturating_sub(begun.elapsed())).max(MOMENT);
        let finding = match looker.take().or_else(|| Looker::start(&looks, &machine, look_idx).ok()) {
            None => (look.examine)(&machine),
            Some(present) => match present.findings.recv_timeout(limit) {
                Ok(finding) => {
                    looker = Some(present);
                    finding
                }
                Err(RecvTimeoutError::Timeout) => {
                    let meaning = "whatever needs it may hang as well";
                    Finding::bad(
                        format!("no answer within {limit:?}"),
                        meaning,
                        "see what hangs: a disk, a network, a program",
                    )
                }
                Err(RecvTimeoutError::Disconnected) => Finding::bad(
                    "the look at it broke",
                    "nothing is known of it",
                    "look at the message before this report",
                ),
            },
        };
        let line = |text: String| programs::one_line(&text);
        let Finding { state, found, meaning, remedy } = finding;
        checks.push(Check {
            name: look.name.clone(),
            state,
            found: line(found),
            meaning: line(meaning),
            remedy: remedy.map(line),
        });
    }
    if let Some(looker) = looker {
        // It has said all, and lets go of the node; the last to do so waits until nothing of that is left.
        let _ = looker.thread.join();
    }
    Report { checks }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_hangs_or_breaks_costs_no_other() {
        let (release, held) = mpsc::channel::<()>();
        let held = parking_lot::Mutex::new(held);
        let fine = |_: &Machine| Finding::ok("fine\nand \x1b[1mwell", "meant");
        let look = |name: &str, examine| Look { name: name.to_owned(), limit: Duration::ZERO, examine };
        let looks = vec![
            look("before", Box::new(fine)),
            look(
                "hangs",
                Box::new(move |_| {
                    let _ = held.lock().recv();
                    Finding::ok("too late", "meant")
                }),
            ),
            look("between", Box::new(fine)),
            look("breaks", Box::new(|_| panic!("as it is to"))),
            look("after", Box::new(fine)),
        ];
        let report = make(looks, &Config::new("/guest"));
        drop(release);
        let found: Vec<_> = report.checks.iter().map(|check| (check.name.as_str(), check.found.as_str())).collect();
        let fine = "fine and well";
        assert_eq!(
            found,
            [
                ("before", fine),
                ("hangs", "no answer within 1s"),
                ("between", fine),
                ("breaks", "the look at it broke"),
                ("after", fine)
            ]
        );
        assert!(!report.can_run());
    }
}
