//! Loopback addresses, unique among threads and processes.

use std::{
    collections::HashSet,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv4Addr, TcpListener},
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    },
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::atomic::AtomicU32,
    thread,
};

use nix::sys::{prctl::set_pdeathsig, signal::Signal};

use crate::node::{Loopback, loopback::COUNT};

/// How many processes lease at once.
const N_PROCESSES: usize = 64;

/// How often each leases anew.
const N_ROUNDS: usize = 100;

/// Tells a copy of this program that it is one of the processes.
const ROLE: &str = "PRORL_TEST_LEASES";

#[test]
fn threads_share_no_address() {
    let leases: Vec<Loopback> = thread::scope(|scope| {
        let lease = || (0..100).map(|_| Loopback::lease().unwrap()).collect::<Vec<_>>();
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(lease)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let addresses: HashSet<_> = leases.iter().map(Loopback::address).collect();
    assert_eq!(addresses.len(), 800);
    assert!(addresses.iter().all(|address| address.is_loopback() && ![0, 255].contains(&address.octets()[3])));
}

/// One of the processes. It is told a port and a place, leases from that place on as all the others do, and proves that each
/// address is its own: the kernel lets one socket alone listen on an address and port.
#[test]
fn process() {
    if std::env::var_os(ROLE).is_none() {
        return; // not a test by itself
    }
    set_pdeathsig(Signal::SIGKILL).unwrap();
    println!("started");
    let mut order = String::new();
    std::io::stdin().read_line(&mut order).unwrap();
    let (port, first) = order.trim().split_once(' ').unwrap();
    let (port, first): (u16, u32) = (port.parse().unwrap(), first.parse().unwrap());
    let mut held = Vec::new();
    for round_idx in 0..N_ROUNDS {
        // Some of the last round's stay, so that addresses are held for times of different lengths.
        held.truncate(round_idx % 3);
        let next = AtomicU32::new(first);
        for _ in 0..=round_idx % 4 {
            let lease = Loopback::lease_from(&next).unwrap();
            let proof = TcpListener::bind((lease.address(), port));
            let proof = proof.unwrap_or_else(|error| panic!("{lease:?} is held twice: {error}"));
            held.insert(0, (proof, lease)); // dropped in this order
        }
    }
    println!("holds {}", held[0].1.address());
    // It is killed with what it holds.
    let _ = std::io::stdin().read(&mut [0]);
}

struct Process {
    child: Child,
    stdin: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Process {
    fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "node::tests::loopback::process", "--nocapture", "--test-threads=1"]).env(ROLE, "1");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, stdin, lines: BufReader::new(stdout) }
    }

    /// Reads up to a line with `mark`; returns what follows.
    fn told(&mut self, mark: &str) -> String {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if let Some((_, rest)) = line.split_once(mark) {
                return rest.trim().to_owned();
            }
            line.clear();
        }
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        panic!("{said}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn no_two_processes_hold_an_address_and_a_killed_one_holds_none() {
    // As long as this is held, nobody is given its port for another address.
    let any = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = any.local_addr().unwrap().port();
    let mut processes: Vec<Process> = (0..N_PROCESSES).map(|_| Process::start()).collect();
    for process in &mut processes {
        process.told("started");
    }
    // A place of this test's own, so that a run of it beside this one fights for others.
    let first = std::process::id().wrapping_mul(1024) % COUNT;
    for process in &mut processes {
        writeln!(process.stdin, "{port} {first}").unwrap();
    }
    let held: Vec<String> = processes.iter_mut().map(|process| process.told("holds ")).collect();
    assert_eq!(held.iter().collect::<HashSet<_>>().len(), N_PROCESSES);
    let take = |address: &String| {
        UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(format!("prorl-loopback-{address}")).unwrap())
    };
    assert!(held.iter().all(|address| take(address).is_err()), "an address is free while it is held");
    drop(processes);
    assert!(held.iter().all(|address| take(address).is_ok()), "a killed process holds an address");
}
