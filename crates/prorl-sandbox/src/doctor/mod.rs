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

mod kernel;
mod machine;
mod programs;
mod trial;

use std::{
    path::PathBuf,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use serde::Serialize;

use crate::{NodeConfig, SandboxUser};

/// How long a check may take that only looks.
const LOOK: Duration = Duration::from_secs(5);

/// How long a check may take that starts something.
const TRY: Duration = Duration::from_secs(30);

/// The checks that start a sandbox of each runtime.
const RUNTIMES: [&str; 2] = ["namespace_runtime", "singularity_runtime"];

/// What is examined.
#[derive(Clone, Debug)]
pub struct Config {
    /// The guest's static program, as a path that the calling process can execute.
    pub guest: PathBuf,
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
            guest,
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

type Examine = Box<dyn FnOnce(&Config) -> Finding + Send>;

/// Every check with its limit, in the order of the report.
fn checks() -> Vec<(String, Duration, Examine)> {
    let mut all: Vec<(String, Duration, Examine)> = Vec::new();
    let mut add = |name: &str, limit, examine: Examine| all.push((name.to_owned(), limit, examine));
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
    add("seccomp", LOOK, Box::new(|_| kernel::seccomp()));
    add("overlay", TRY, Box::new(trial::overlay));
    add("apptainer", TRY, Box::new(programs::apptainer));
    add("fuse", LOOK, Box::new(|_| programs::fuse()));
    add("squashfuse", LOOK, Box::new(programs::squashfuse));
    add("fuse_overlayfs", LOOK, Box::new(programs::fuse_overlayfs));
    add("subuid", LOOK, Box::new(programs::subuid));
    add("subgid", LOOK, Box::new(programs::subgid));
    add("newuidmap", LOOK, Box::new(|_| programs::newuidmap()));
    add("fake_root", TRY, Box::new(trial::fake_root));
    add("python", TRY, Box::new(trial::python));
    add("cgroups", LOOK, Box::new(|_| machine::cgroups()));
    add("kvm", LOOK, Box::new(|_| machine::kvm()));
    add("open_files", LOOK, Box::new(|_| machine::open_files()));
    add("processes", LOOK, Box::new(|_| machine::processes()));
    add("locked_memory", LOOK, Box::new(|_| machine::locked_memory()));
    add("address_space", LOOK, Box::new(|_| machine::address_space()));
    add("file_size", LOOK, Box::new(|_| machine::file_size()));
    add("temp_dir", LOOK, Box::new(|config| machine::disk(&config.temp_dir)));
    add("run_dir", LOOK, Box::new(|config| machine::disk(&config.run_dir)));
    add("loopback", LOOK, Box::new(|_| machine::loopback()));
    all
}

/// Examines this machine as the calling process's user sees it. Takes about a second and leaves nothing behind.
///
/// Blocks, so an async caller puts it on a thread for blocking work. Every check has a limit of time; one that passes it, such as
/// a look at a network file system that does not answer, is reported so, and its thread is left to itself.
pub fn examine(config: &Config) -> Report {
    let config = Arc::new(config.clone());
    let running: Vec<_> = checks()
        .into_iter()
        .map(|(name, limit, examine)| {
            let (done, found) = mpsc::channel();
            let config = Arc::clone(&config);
            let started = thread::Builder::new().name(format!("doctor {name}")).spawn(move || {
                // A report that nobody waits for any more has no reader.
                let _ = done.send(examine(&config));
            });
            (name, limit, found, started)
        })
        .collect();
    let checks = running.into_iter().map(|(name, limit, found, started)| {
        let finding = match started {
            Ok(_thread) => found.recv_timeout(limit).unwrap_or_else(|_late| {
                let meaning = "whatever needs it may hang as well";
                Finding::not(State::Bad, format!("no answer within {limit:?}"), meaning, None)
            }),
            Err(error) => Finding::bad(
                format!("no thread to look from: {error}"),
                "this process may start no more",
                "raise the limit of processes (ulimit -u)",
            ),
        };
        let Finding { state, found, meaning, remedy } = finding;
        Check { name, state, found, meaning, remedy }
    });
    Report { checks: checks.collect() }
}
