//! The Python interpreter as an agent meets it.

use std::{io::Write, time::Duration};

use prorl_tools::{
    host::CellCall,
    wire::{CellEnd, Interrupt},
};

use crate::{
    exec::runs,
    guest::{Guest, LONG},
};

const MS: fn(u64) -> Duration = Duration::from_millis;

/// Returns a guest whose Python has no `IPython`, and the folder that hides it.
pub(crate) async fn without_ipython() -> (Guest, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("IPython.py"), "raise ImportError").unwrap();
    let guest = Guest::bare(&[("PYTHONPATH", folder.path().to_str().unwrap())]);
    assert_eq!(guest.cell("'get_ipython' in globals()").await, "False\n");
    (guest, folder)
}

/// Returns a guest whose Python has `IPython`, if this machine has it.
pub(crate) async fn with_ipython() -> Option<Guest> {
    let guest = Guest::bare(&[]);
    if guest.cell("'get_ipython' in globals()").await == "True\n" {
        return Some(guest);
    }
    let _said = writeln!(std::io::stderr(), "skipped: python3 has no IPython here");
    None
}

#[tokio::test]
async fn values_output_and_state() {
    values(&Guest::start().await).await;
}

#[tokio::test]
async fn values_output_and_state_with_and_without_ipython() {
    values(&without_ipython().await.0).await;
    if let Some(guest) = with_ipython().await {
        values(&guest).await;
        assert_eq!(guest.cell("!echo shell").await, "shell\n");
        assert_eq!(guest.cell("%%bash\necho a\necho b").await, "a\nb\n");
        assert_eq!(guest.cell("1;").await, "[The cell ran without output.]");
        let text = guest.cell("%timeit -n1 -r1 pass").await;
        assert!(text.contains("1 loop each"), "{text}");
    }
}

async fn values(guest: &Guest) {
    for (code, text) in [
        ("1 + 1", "2\n"),
        ("x = 20\nx * 2", "40\n"),
        ("x + 1", "21\n"),
        ("None", "[The cell ran without output.]"),
        ("def f(n):\n    return n * 2\n\nclass C: pass", "[The cell ran without output.]"),
        ("f(21)", "42\n"),
        ("print('a'); print('b', end=''); 'c'", "a\nb'c'\n"),
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('out2')", "out\nerr\nout2\n"),
        (
            "import subprocess, os\nprint('first')\nsubprocess.run(['echo', 'child'])\nos.write(1, b'raw\\n')\nprint('last')",
            "first\nchild\nraw\nlast\n",
        ),
        ("__name__", "'__main__'\n"),
        ("import pickle; type(pickle.loads(pickle.dumps(C()))) is C", "True\n"),
        ("open('/dev/stdin').read()", "''\n"),
        ("'caf\\u00e9'", "'caf\u{e9}'\n"),
        ("'\\ud800'", "'\\ud800'\n"),
        ("import asyncio; await asyncio.sleep(0, 'slept')", "'slept'\n"),
        ("async with asyncio.Lock(): print('held')", "held\n"),
        ("asyncio.run(asyncio.sleep(0, 'run'))", "'run'\n"),
    ] {
        assert_eq!(guest.cell(code).await, text, "{code}");
    }
}

#[tokio::test]
async fn tracebacks_show_the_cell_and_no_colour() {
    tracebacks(&Guest::start().await).await;
}

#[tokio::test]
async fn tracebacks_show_the_cell_with_and_without_ipython() {
    tracebacks(&without_ipython().await.0).await;
    if let Some(guest) = with_ipython().await {
        tracebacks(&guest).await;
    }
}

async fn tracebacks(guest: &Guest) {
    let answer = guest.client().ipython("def f():\n    return 1 / 0\n\nf()", LONG).await.unwrap();
    let text = answer.output.text();
    assert_eq!(answer.end, CellEnd::Raised);
    assert!(text.contains("return 1 / 0") && text.contains("ZeroDivisionError: division by zero"), "{text}");
    assert!(!text.contains('\u{1b}') && !text.contains("_prorl"), "{text}");
    let text = guest.cell("if x").await;
    assert!(text.contains("SyntaxError"), "{text}");
    let text = guest.cell("raise KeyboardInterrupt").await;
    assert!(text.contains("KeyboardInterrupt"), "{text}");
    assert_eq!(guest.cell("'still here'").await, "'still here'\n");
}

#[tokio::test]
async fn nothing_asks_a_person() {
    questions(&Guest::start().await).await;
}

#[tokio::test]
async fn nothing_asks_a_person_with_and_without_ipython() {
    questions(&without_ipython().await.0).await;
    if let Some(guest) = with_ipython().await {
        questions(&guest).await;
    }
}

async fn questions(guest: &Guest) {
    let text = guest.cell("name = input('name? ')").await;
    assert!(text.contains("RuntimeError") && text.contains("input() does not work here"), "{text}");
    assert_eq!(guest.cell("y = 1\nimport sys\nsys.exit(3)").await, "SystemExit: 3 (the interpreter goes on)\n");
    assert_eq!(guest.cell("exit()").await, "SystemExit (the interpreter goes on)\n");
    assert_eq!(guest.cell("y").await, "1\n");
    for (code, words) in [
        ("import getpass; getpass.getpass()", "getpass() does not work here"),
        ("breakpoint()", "A debugger does not work here"),
    ] {
        let text = guest.cell(code).await;
        assert!(text.contains(words) && text.len() < 800, "{text}");
    }
    for code in ["exit", "quit"] {
        assert_eq!(guest.cell(code).await, "exit() ends a cell; the interpreter goes on.\n");
    }
}

#[tokio::test]
async fn magics_know_that_nobody_is_there() {
    let Some(guest) = with_ipython().await else { return };
    assert_eq!(guest.cell("mine = 1\n%who").await, "mine\t \n");
    for magic in ["%edit x.py", "%ed"] {
        let text = guest.cell(magic).await;
        assert!(text.starts_with("UsageError: %edit does not work here") && text.lines().count() == 1, "{text}");
    }
    // What is left out of IPython to start sooner is there for who wants it.
    assert_eq!(guest.cell("import sys; [m for m in sys.modules if m.startswith(('jedi', 'prompt_t'))]").await, "[]\n");
    assert_eq!(guest.cell("from IPython import embed; embed.__module__").await, "'IPython.terminal.embed'\n");
    assert_eq!(guest.cell("import jedi; jedi.__name__").await, "'jedi'\n");
}

#[tokio::test]
async fn a_cell_keeps_its_streams_however_the_last_one_left_them() {
    for guest in [Some(without_ipython().await.0), with_ipython().await].iter().flatten() {
        for code in [
            "import sys; sys.stdout.close(); sys.stderr.close()",
            "import os; os.close(1); os.close(2)",
            "os.dup2(os.open('/dev/null', os.O_WRONLY), 1)",
            "sys.stdout = sys.stderr = None",
            "sys.stdout.detach();",
            // The stream in its place closes it when it is let go of.
            "import io; sys.stdout = io.TextIOWrapper(sys.stdout.buffer)",
        ] {
            guest.cell(code).await;
            let text = guest
                .cell("import subprocess\nprint('a'); subprocess.run(['echo', 'b']); print('c', file=sys.stderr)")
                .await;
            assert_eq!(text, "a\nb\nc\n", "{code}");
        }
        // An exception is told whatever the cell has done before.
        for code in ["sys.stdout = sys.stderr = None\n1 / 0", "sys.stdout.close(); sys.stderr.close()\n1 / 0"] {
            let text = guest.cell(code).await;
            assert!(text.contains("ZeroDivisionError"), "{code}: {text}");
        }
    }
}

#[tokio::test]
async fn tracebacks_are_coloured_when_asked_for() {
    let Some(guest) = with_ipython().await else { return };
    for color in [true, false, true] {
        let call = CellCall { color, ..CellCall::new("1 / 0") };
        let text = guest.client().cell(&call, LONG).await.unwrap().output.text();
        assert_eq!(text.contains("\u{1b}["), color, "{text}");
    }
}

#[tokio::test]
async fn marks_under_a_fault_are_in_their_place() {
    let text = without_ipython().await.0.cell("x = [1]\nif x:\n    x[0] / 0").await;
    // Pythons before 3.11 have none.
    assert!(!text.contains('~') || text.contains("\n    x[0] / 0\n    ~~~~~^~~\n"), "{text}");
}

#[tokio::test]
async fn the_limit_interrupts_and_keeps_the_state() {
    limits(&Guest::start().await).await;
    if let Some(guest) = with_ipython().await {
        limits(&guest).await;
    }
}

async fn limits(guest: &Guest) {
    guest.cell("kept = 7\nimport signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)").await;
    for code in [
        "print('start')\nwhile True: pass",
        "print('start')\nimport time; time.sleep(100)",
        "print('start')\nimport subprocess; subprocess.run(['sleep', '100'])",
    ] {
        let answer = guest.client().ipython(code, MS(400)).await.unwrap();
        assert_eq!(answer.end, CellEnd::LimitPassed { limit_ms: 400, by: Interrupt::Signal }, "{code}");
        let text = answer.output.text();
        assert!(
            text.starts_with("start\n") && text.contains("KeyboardInterrupt") && !text.contains("<string>"),
            "{text}"
        );
        assert_eq!(guest.cell("kept").await, "7\n");
    }
    let stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('start')\nwhile True: pass";
    let answer = guest.client().ipython(stubborn, MS(300)).await.unwrap();
    assert_eq!(answer.end, CellEnd::LimitPassed { limit_ms: 300, by: Interrupt::Restart }, "{answer:?}");
    assert_eq!(answer.output.text(), "start\n");
    assert!(answer.restarted.is_some());
    assert!(guest.cell("kept").await.contains("NameError"));
}

#[tokio::test]
async fn a_dead_interpreter_is_said_and_replaced() {
    let guest = Guest::start().await;
    for (code, reason) in [
        ("import os\nprint('last words')\nos._exit(9)", "The interpreter ended with exit code 9."),
        (
            "import os, signal\nprint('last words')\nos.kill(os.getpid(), signal.SIGSEGV)",
            "The interpreter was killed by signal 11.",
        ),
    ] {
        let answer = guest.client().ipython(code, LONG).await.unwrap();
        assert_eq!((answer.end, answer.restarted.as_deref()), (CellEnd::Died, Some(reason)));
        assert_eq!(answer.output.text(), "last words\n");
        assert_eq!(guest.cell("1").await, "1\n");
    }
}

#[tokio::test]
async fn large_output_is_bounded_and_counted() {
    let guest = Guest::start().await;
    let answer = guest.client().ipython("print('x' * 1_000_000)", LONG).await.unwrap();
    assert_eq!((answer.output.total, answer.output.bytes().len()), (1_000_001, 128 * 1024));
}

#[tokio::test]
async fn a_fork_in_a_cell_does_not_answer_twice() {
    let guest = Guest::start().await;
    assert_eq!(
        guest.cell("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\n'parent' if pid else None").await,
        "'parent'\n"
    );
    assert_eq!(guest.cell("2").await, "2\n");
}

#[tokio::test]
async fn a_fork_ends_with_its_cell_and_as_it_says() {
    for guest in [Some(without_ipython().await.0), with_ipython().await].iter().flatten() {
        for (end, code) in [("pass", 0), ("sys.exit(7)", 7), ("sys.exit()", 0), ("exit(3)", 3), ("os._exit(4)", 4)] {
            let cell =
                format!("import os, sys\npid = os.fork()\nif pid: print(os.waitpid(pid, 0)[1] >> 8)\nelse: {end}");
            assert_eq!(guest.cell(&cell).await, format!("{code}\n"), "{end}");
        }
        let cell = "import multiprocessing as m\ndef f(n): return n * 2\nwith m.get_context('fork').Pool(2) as pool: print(pool.map(f, [1, 2]))";
        assert_eq!(guest.cell(cell).await, "[2, 4]\n");
    }
}

#[tokio::test]
async fn what_awaits_when_it_is_interrupted_does_not_go_on() {
    let guest = without_ipython().await.0;
    let cell = "import asyncio\nasync def later():\n    await asyncio.sleep(1)\n    print('later')\nawait later()";
    let answer = guest.client().ipython(cell, MS(300)).await.unwrap();
    assert_eq!(answer.end, CellEnd::LimitPassed { limit_ms: 300, by: Interrupt::Signal }, "{answer:?}");
    assert_eq!(guest.cell("await asyncio.sleep(1.5)").await, "[The cell ran without output.]");
}

#[tokio::test]
async fn a_loop_that_takes_every_exception_is_killed() {
    let guest = Guest::start().await;
    guest.cell("'started'").await;
    let cell = "import time\nprint('start')\nwhile True:\n    try: time.sleep(1)\n    except BaseException: pass";
    let answer = guest.client().ipython(cell, MS(300)).await.unwrap();
    assert_eq!(answer.end, CellEnd::LimitPassed { limit_ms: 300, by: Interrupt::Restart }, "{answer:?}");
    assert_eq!((answer.output.text().as_str(), answer.restarted.is_some()), ("start\n", true));
    assert_eq!(guest.cell("1").await, "1\n");
}

#[tokio::test]
async fn an_interpreter_that_closes_its_channel_is_replaced_without_a_word_of_ours() {
    let guest = Guest::start().await;
    let answer =
        guest.client().ipython("import os\nprint('a')\nos.closerange(3, 1000)\nprint('b')", LONG).await.unwrap();
    assert_eq!((answer.end, answer.output.text().as_str()), (CellEnd::Died, "a\nb\n"));
    assert_eq!(guest.cell("1").await, "1\n");
}

#[tokio::test]
async fn a_thread_prints_into_the_cell_that_comes_next() {
    let guest = Guest::start().await;
    guest.cell("import threading, os\ngo, gone = threading.Event(), os.pipe()\ndef late():\n    go.wait()\n    print('late')\n    os.write(gone[1], b'.')\nthreading.Thread(target=late, daemon=True).start()").await;
    assert_eq!(guest.cell("go.set(); os.read(gone[0], 1); 2").await, "late\n2\n");
}

#[tokio::test]
async fn a_repr_of_any_size_is_bounded() {
    let guest = Guest::start().await;
    let answer = guest.client().ipython("'x' * 100_000_000", LONG).await.unwrap();
    assert_eq!((answer.output.total, answer.output.bytes().len()), (100_000_003, 128 * 1024));
}

#[tokio::test]
async fn a_stopped_interpreter_does_not_hold_up_the_limit() {
    let guest = Guest::start().await;
    let pid = guest.cell("import os; os.getpid()").await;
    assert_eq!(guest.run(&format!("kill -STOP {}", pid.trim())).await, (String::new(), 0));
    // More than the channel holds.
    let cell = format!("import time\ntime.sleep(100)\n# {}", "x".repeat(2_000_000));
    let answer = guest.client().ipython(&cell, MS(500)).await.unwrap();
    assert!(matches!(answer.end, CellEnd::LimitPassed { limit_ms: 500, .. }), "{answer:?}");
    assert_eq!(guest.cell("1").await, "1\n");
    // A driver that runs takes it in pieces.
    assert_eq!(guest.cell(&format!("len('{}')", "x".repeat(2_000_000))).await, "2000000\n");
}

#[tokio::test]
async fn what_an_interpreter_starts_while_it_is_killed_is_killed_too() {
    let guest = Guest::bare(&[]);
    // Each leads a group or a session of its own, where a signal to the interpreter's group does not come, and has a successor
    // as soon as it is killed.
    let cell = "import os, signal, threading
signal.signal(signal.SIGINT, signal.SIG_IGN)
def start(lead):
    while True:
        try: os.waitpid(os.posix_spawnp('sleep', ['sleep', '86394.125'], os.environ, **lead), 0)
        except OSError: pass
for lead in (dict(setpgroup=0), dict(setsid=True)) * 4:
    threading.Thread(target=start, args=(lead,)).start()";
    guest.cell("'started'").await;
    let answer = guest.client().ipython(&format!("{cell}\nwhile True: signal.pause()"), MS(300)).await.unwrap();
    assert_eq!(answer.end, CellEnd::LimitPassed { limit_ms: 300, by: Interrupt::Restart }, "{answer:?}");
    assert!(!runs("86394.125"));
}

/// Modules of the names that the driver, IPython and both on their way to a traceback import.
const TAKEN: &[&str] = &[
    "ast",
    "code",
    "json",
    "linecache",
    "pdb",
    "pprint",
    "queue",
    "random",
    "signal",
    "socket",
    "struct",
    "traceback",
    "types",
];

#[tokio::test]
async fn a_tasks_modules_are_not_taken_for_the_drivers() {
    let guest = Guest::start().await;
    for name in TAKEN {
        let path = format!("/workspace/{name}.py");
        guest.client().write_file(&path, b"raise Exception('not yours')\nmine = 1\n", 0o644, LONG).await.unwrap();
    }
    guest.client().write_file("/workspace/mine.py", b"answer = 42\n", 0o644, LONG).await.unwrap();
    assert_eq!(guest.cell("1 + 1").await, "2\n");
    let text = guest.cell("1 / 0").await;
    assert!(text.contains("ZeroDivisionError") && !text.contains("not yours"), "{text}");
    // Cells import from the folder, as programs do.
    assert_eq!(guest.cell("import mine; mine.answer").await, "42\n");
}

#[tokio::test]
async fn a_tasks_modules_are_not_taken_for_the_drivers_without_ipython() {
    let (hides, tasks) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(hides.path().join("IPython.py"), "raise ImportError").unwrap();
    for name in TAKEN {
        std::fs::write(tasks.path().join(format!("{name}.py")), "raise Exception('not yours')").unwrap();
    }
    std::fs::write(tasks.path().join("mine.py"), "answer = 42").unwrap();
    let guest = Guest::bare_in(tasks.path(), &[("PYTHONPATH", hides.path().to_str().unwrap())]);
    assert_eq!(guest.cell("'get_ipython' in globals()").await, "False\n");
    let text = guest.cell("1 / 0").await;
    assert!(text.contains("ZeroDivisionError") && !text.contains("not yours"), "{text}");
    assert_eq!(guest.cell("import mine; mine.answer").await, "42\n");
}
