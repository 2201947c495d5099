//! The program that becomes process 1 of a sandbox: it builds the sandbox around itself, says hello, serves the tools, and
//! takes everything inside with it when its channel closes. The same program owns launchers such as Apptainer, keeps nodes, and
//! copies and removes the files of sandboxes that have ended.

use std::{env, io::Write as _, process::ExitCode};

use prorl_core::hello::{Greeting, Hello, PROTOCOL};
use prorl_sandbox::{
    init, node,
    setup::{LAUNCHED_FLAG, Order},
};
use prorl_tools::guest::{self, TaskLimits, Terms};

fn main() -> ExitCode {
    let flag = env::args_os().nth(1);
    if flag.as_ref().is_some_and(|flag| flag == prorl_guest::VERSION_FLAG) {
        let told = writeln!(std::io::stdout(), "prorl-guest {}", env!("CARGO_PKG_VERSION"));
        return if told.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    // Nobody reads standard error, and a panic's words may hold what a task wrote. The program aborts (see the profile), and
    // the host sees its channel close.
    std::panic::set_hook(Box::new(|_| {}));
    if flag.is_some_and(|flag| flag == LAUNCHED_FLAG) && init::announce().is_err() {
        return ExitCode::FAILURE;
    }
    let Ok(channel) = init::channel() else { return ExitCode::FAILURE };
    let entered = match init::read_order(&channel) {
        Ok(Order::Enter(setup)) => init::enter(&channel, &setup),
        Ok(Order::Launch(order)) => init::launch(&channel, &order).map(|never| match never {}),
        Ok(Order::Keep(order)) => node::keep(channel, &order),
        Ok(Order::Own(order)) => init::own(&channel, &order),
        Ok(Order::Freeze(order)) => return told(&init::answer(&channel, init::freeze(&channel, &order))),
        Ok(Order::Remove(order)) => return told(&init::answer(&channel, init::remove(&channel, &order))),
        Err(failure) => Err(failure),
    };
    let facts = match entered {
        Ok(facts) => facts,
        Err(failure) => {
            // Nothing can be done about a host that is gone too.
            let _ = init::greet(&channel, &Greeting::Failed(failure), &[]);
            return ExitCode::FAILURE;
        }
    };
    let programs = guest::probe();
    let hello = Hello {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        host_pid: 0, // the host knows it from the kernel
        pid_namespace: facts.pid_namespace,
        user_namespace: facts.user_namespace,
        launcher_namespace: facts.launcher_namespace,
        uid: facts.uid,
        fakeroot: facts.fakeroot,
        bash: programs.bash.clone(),
        python: programs.python.clone(),
    };
    if init::greet(&channel, &Greeting::Ready(hello), &facts.shown).is_err() {
        return ExitCode::FAILURE;
    }
    drop(facts.shown); // the host's now
    let limits = TaskLimits {
        processes: facts.walls.pids.map(u64::from),
        open_files: facts.walls.open_files,
        file_bytes: facts.walls.file_bytes,
    };
    guest::serve(channel, programs, Terms { limits, scratch: Some(facts.scratch) })
}

/// The status of a process that has one thing to tell: who does not hear it is gone.
fn told(told: &std::io::Result<()>) -> ExitCode {
    if told.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
