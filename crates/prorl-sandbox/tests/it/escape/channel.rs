//! The guest's channel to its host: whoever has it is the host.

use super::{Den, Proof, attack, outside};
use crate::support::Live;

pub(super) async fn the_guests_files_cannot_be_taken(den: &Den) {
    let take = "
def take(pid):
    'Takes every open file of a process that can be taken; returns how many.'
    handle, taken, why = os.pidfd_open(pid), 0, set()
    for number in range(64):
        try: call(GETFD, handle, number, 0); taken += 1
        except OSError as error: why.add(errno.errorcode[error.errno])
    for number in range(64):
        try: os.close(os.open('/proc/%d/fd/%d' % (pid, number), os.O_RDWR)); taken += 1
        except OSError as error: why.add(errno.errorcode[error.errno])
    return taken or ' '.join(sorted(why))
"
    .replace("GETFD", &libc::SYS_pidfd_getfd.to_string());
    let attacks = [
        // None is left open for tasks.
        attack(
            "own",
            "sorted({kind.split(':')[0] for kind in (os.readlink('/proc/self/fd/%d' % number) for number in range(3, 64) if os.path.lexists('/proc/self/fd/%d' % number))}) or 'nothing'",
            &["nothing"],
            Proof::Nobody,
        ),
        attack("take", "take(1)", &["EACCES EPERM", "EACCES ENOENT EPERM"], Proof::Nobody),
        attack(
            "list",
            "[os.readlink('/proc/1/fd/' + name) for name in os.listdir('/proc/1/fd')] or 'nothing'",
            &["EACCES", "nothing"],
            Proof::Nobody,
        ),
        attack(
            "tasks",
            "[os.readlink('/proc/1/task/1/fd/' + name) for name in os.listdir('/proc/1/task/1/fd')] or 'nothing'",
            &["EACCES", "nothing"],
            Proof::Nobody,
        ),
        attack("folder", "os.readlink('/proc/1/cwd')", &["EACCES"], Proof::Nobody),
        attack(
            "dump",
            "os.kill(1, signal.SIGABRT) or os.kill(1, signal.SIGSEGV) or os.kill(1, 0) or 'alive'",
            &["alive"],
            Proof::Nobody,
        ),
    ];
    let code = format!("{take}{}", super::all(&attacks));
    for (runtime, spec) in &den.cells {
        let live = Live::start_on(&**runtime, spec).await;
        let said = live.python(&code).await;
        for attack in &attacks {
            let came = super::came_of(attack, &said);
            assert!(attack.refusals.contains(&came), "{}: {}: {came}\n{said}", den.name, attack.code);
        }
        assert_eq!(live.sh("echo alive").await, "alive");
        live.shut().await;
    }
    // From a child of one's own they can be taken.
    let own = format!(
        "{take}child = os.fork()\nif child == 0: signal.pause()\nprint(take(child))\nos.kill(child, 9)\nos.waitpid(child, 0)"
    );
    assert!(outside(&own).parse::<u32>().is_ok_and(|taken| taken >= 3));
}
