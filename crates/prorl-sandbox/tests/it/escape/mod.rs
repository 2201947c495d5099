//! Attacks on the walls of a sandbox, by real programs in real sandboxes of each runtime, with and without a fake root.
//!
//! Each attack is a line of Python that is run inside and must be refused. So that the test of a wall does not pass for a
//! mistake in the attack, the same line is run outside of every sandbox by this process's user, where it must come to something
//! else.

mod channel;
mod files;
mod kernel;
mod network;
mod processes;

use std::{path::Path, process::Command, sync::Arc};

use prorl_sandbox::{Bind, NamespaceConfig, NamespaceRuntime, Runtime, SandboxSpec};
use prorl_tools::host::ExecSpec;

use crate::{
    contract::Ground,
    fakeroot::user_with_range,
    support::{LONG, Live, is_root, skip, spec},
};

/// The machine's own, which a sandbox sees too.
const PYTHON: &str = "/usr/bin/python3";

/// What attacks are written in.
const TOOLS: &str = r#"
import ctypes, errno, os, signal, socket, stat, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def call(number, *arguments):
    result = libc.syscall(*[ctypes.c_long(argument) for argument in (number, *arguments)])
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
    return result

def forked(attack):
    "Has a child do it, whose own state alone may change."
    child = os.fork()
    if child == 0:
        try: attack()
        except OSError as error: os._exit(error.errno)
        except BaseException: os._exit(255)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status != 0: raise OSError(os.waitstatus_to_exitcode(status), "refused")

def attempt(name, attack):
    try: came = attack()
    except OSError as error: print(name, errno.errorcode.get(error.errno, error.errno))
    else: print(name, "done" if came is None or came is True or isinstance(came, int) and came >= 0 else came)

def node(kind, major, minor):
    import tempfile
    with tempfile.TemporaryDirectory() as folder: os.mknod(folder + "/node", kind | 0o666, os.makedev(major, minor))

def copy(pid):
    "Copies a few bytes from where this process has some too."
    letters = ctypes.create_string_buffer(8)
    part = (ctypes.c_uint64 * 2)(ctypes.addressof(letters), 8)
    return libc.process_vm_readv(pid, part, 1, part, 1, 0) == 8 or fail()

def fail(): raise OSError(ctypes.get_errno(), "refused")

def read(path, n=64):
    with open(path, "rb") as file: return file.read(n).decode(errors="replace")
"#;

/// Who can do outside what an attack wants to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Proof {
    /// Everybody.
    Anybody,
    /// Root.
    Root,
    /// Nobody without harm, or only where the kernel was built for it.
    Nobody,
}

/// Something that must not come true inside.
struct Attack {
    /// One word.
    name: String,
    /// A Python expression.
    code: String,
    /// What may come of it inside: names of errors, mostly.
    refusals: Vec<&'static str>,
    proof: Proof,
}

fn attack(name: &str, code: impl Into<String>, refusals: &[&'static str], proof: Proof) -> Attack {
    Attack { name: name.to_owned(), code: code.into(), refusals: refusals.to_vec(), proof }
}

/// Runtimes of one kind, and what they are to start.
struct Den {
    name: &'static str,
    cells: Vec<(Arc<dyn Runtime>, SandboxSpec)>,
    _ground: Option<Ground>,
}

impl Den {
    /// Says so and returns nothing where there is no Python.
    fn namespace(test: &str) -> Option<Self> {
        has_python(test)?;
        let runtime = |sandbox_user| -> Arc<dyn Runtime> {
            Arc::new(NamespaceRuntime::new(crate::support::node(), NamespaceConfig { sandbox_user }))
        };
        let mut cells = vec![(runtime(None), spec()), (runtime(None), SandboxSpec { fakeroot: true, ..spec() })];
        if let Some(user) = user_with_range().filter(|_user| is_root()) {
            cells.push((runtime(Some(user)), SandboxSpec { fakeroot: true, ..spec() }));
        }
        Some(Self { name: "namespace", cells, _ground: None })
    }

    /// Says so and returns nothing where there is no Python or no Apptainer.
    fn singularity(test: &str) -> Option<Self> {
        has_python(test)?;
        let ground = Ground::singularity(test)?;
        let spec = with_python(ground.spec());
        let cells =
            [false, true].map(|fakeroot| (Arc::clone(&ground.runtime), SandboxSpec { fakeroot, ..spec.clone() }));
        Some(Self { name: "singularity", cells: cells.into(), _ground: Some(ground) })
    }

    /// Makes every attack in each of the sandboxes, and outside.
    async fn withstands(&self, attacks: &[Attack]) {
        for (runtime, spec) in &self.cells {
            let live = Live::start_on(&**runtime, spec).await;
            self.holds(&live, attacks).await;
            live.shut().await;
        }
        prove(attacks);
    }

    /// Makes every attack in this one sandbox.
    async fn holds(&self, live: &Live, attacks: &[Attack]) {
        let said = live.python(&all(attacks)).await;
        for attack in attacks {
            let came = came_of(attack, &said);
            assert!(attack.refusals.contains(&came), "{}: {}: {came}\n{said}", self.name, attack.code);
        }
    }
}

/// A sandbox of an image without Python, with that of the machine.
pub(crate) fn with_python(spec: SandboxSpec) -> SandboxSpec {
    let python = Bind { source: "/usr".into(), target: "/usr".into(), writable: false };
    SandboxSpec { binds: vec![python], ..spec }
}

pub(crate) fn has_python(test: &str) -> Option<()> {
    if !Path::new(PYTHON).exists() {
        skip(test, "no python3 here");
        return None;
    }
    Some(())
}

/// Makes the attacks outside of every sandbox, where those that can be proved to work must work.
fn prove(attacks: &[Attack]) {
    let said = outside(&all(attacks));
    for attack in attacks {
        let is_proof = match attack.proof {
            Proof::Anybody => true,
            Proof::Root => is_root(),
            Proof::Nobody => false,
        };
        // A call that the kernel does not have proves nothing either way.
        let came = came_of(attack, &said);
        assert!(!is_proof || came == "ENOSYS" || !attack.refusals.contains(&came), "outside: {}: {came}", attack.code);
    }
}

fn all(attacks: &[Attack]) -> String {
    let lines = attacks.iter().map(|attack| format!("attempt({:?}, lambda: {})", attack.name, attack.code));
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns what came of an attack, by the line that tells.
fn came_of<'a>(attack: &Attack, said: &'a str) -> &'a str {
    let line = said.lines().find_map(|line| line.strip_prefix(&attack.name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{}: {said}", attack.name))
}

/// Runs a program outside of every sandbox, as this process's user.
fn outside(code: &str) -> String {
    let done = Command::new(PYTHON).args(["-I", "-c", &format!("{TOOLS}{code}")]).output().unwrap();
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{errors}\n{code}");
    String::from_utf8(done.stdout).unwrap().trim_end().to_owned()
}

impl Live {
    /// Runs a Python program inside and returns what it printed.
    pub(crate) async fn python(&self, code: &str) -> String {
        let spec = ExecSpec::new([PYTHON, "-I", "-c", &format!("{TOOLS}{code}")]);
        let done = self.tools.exec(&spec, LONG).await.unwrap();
        assert!(done.success(), "{:?} {}\n{code}", done.status, done.stderr.text());
        done.stdout.text().trim_end().to_owned()
    }
}

/// Makes a test of each function for each runtime.
macro_rules! battery {
    ($($module:ident::$name:ident),* $(,)?) => {
        mod namespace {
            $(#[tokio::test]
            async fn $name() {
                if let Some(den) = super::Den::namespace(stringify!($name)) {
                    super::$module::$name(&den).await;
                }
            })*
        }

        mod singularity {
            $(#[tokio::test]
            async fn $name() {
                if let Some(den) = super::Den::singularity(stringify!($name)) {
                    super::$module::$name(&den).await;
                }
            })*
        }
    };
}

battery! {
    channel::the_guests_files_cannot_be_taken,
    files::nothing_is_read_outside,
    files::nothing_is_written_outside,
    files::a_changed_root_leads_nowhere,
    files::other_sandboxes_have_nothing_in_common,
    files::devices_and_the_kernels_own_files_are_closed,
    files::set_user_id_programs_gain_nothing,
    kernel::calls_that_are_no_business_of_a_task_are_refused,
    kernel::no_namespace_is_made_or_entered,
    kernel::sockets_of_other_kinds_are_refused,
    kernel::a_terminal_takes_no_input_from_programs,
    kernel::other_call_tables_are_closed,
    kernel::settings_of_the_kernel_are_closed,
    network::the_hosts_loopback_and_sockets_are_out_of_reach,
    network::on_the_hosts_network_abstract_sockets_are_out_of_reach,
    processes::the_guest_is_not_crippled,
    processes::others_are_neither_seen_nor_signalled,
    processes::nothing_is_read_from_the_memory_of_others,
    processes::common_programs_work,
}
