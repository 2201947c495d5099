//! The terminal that this program is started from.

use std::{
    io::{IsTerminal, stdin, stdout},
    panic,
    sync::{Mutex, Once, PoisonError},
};

use anyhow::Context;
use prorl_tools::wire::WindowSize;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Settings to be restored.
static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

/// Returns the size of the terminal, if there is one.
pub(super) fn size() -> Option<WindowSize> {
    let size = tcgetwinsize(stdout()).or_else(|_none| tcgetwinsize(stdin())).ok()?;
    // A terminal that nobody has told its size, such as a serial line, has none.
    (size.ws_row > 0 && size.ws_col > 0).then_some(WindowSize { rows: size.ws_row, columns: size.ws_col })
}

/// The terminal while it passes every key on as it is. Dropping this restores it, and so does a panic, wherever it happens
/// and before it says a word.
#[derive(Debug)]
pub(super) struct Raw {
    settings: Termios,
}

impl Raw {
    /// Makes the terminal raw, if standard input is one.
    pub(super) fn enter() -> anyhow::Result<Option<Self>> {
        static HOOK: Once = Once::new();
        if !stdin().is_terminal() {
            return Ok(None);
        }
        HOOK.call_once(|| {
            let usual = panic::take_hook();
            panic::set_hook(Box::new(move |panic| {
                restore();
                usual(panic);
            }));
        });
        let mut settings = tcgetattr(stdin()).context("the terminal's settings cannot be read")?;
        *SAVED.lock().unwrap_or_else(PoisonError::into_inner) = Some(settings.clone());
        settings.make_raw();
        let raw = Self { settings };
        raw.again()?;
        Ok(Some(raw))
    }

    /// Makes the terminal raw once more, after somebody else has changed it.
    pub(super) fn again(&self) -> anyhow::Result<()> {
        tcsetattr(stdin(), OptionalActions::Now, &self.settings).context("the terminal cannot be made raw")
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

fn restore() {
    if let Some(settings) = SAVED.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // A terminal that is gone needs no settings.
        let _restored = tcsetattr(stdin(), OptionalActions::Now, &settings);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        env,
        process::{Command, Stdio},
    };

    use nix::pty::openpty;

    use super::*;

    /// The variable that tells a copy of this program that its terminal is there to be spoiled.
    const IN_TERMINAL: &str = "PRORL_TEST_IN_TERMINAL";

    #[test]
    fn a_panic_anywhere_restores_the_terminal() {
        if env::var_os(IN_TERMINAL).is_some() {
            let raw = Raw::enter().unwrap().expect("a terminal");
            assert_ne!(tcgetattr(stdin()).unwrap().local_modes, SAVED.lock().unwrap().as_ref().unwrap().local_modes);
            // Elsewhere, so that nothing is unwound here before the process ends.
            let _panicked = std::thread::spawn(|| panic!("on purpose")).join();
            std::mem::forget(raw);
            return;
        }
        let terminal = openpty(None, None).unwrap();
        let before = tcgetattr(&terminal.slave).unwrap();
        let copy = Command::new(env::current_exe().unwrap())
            .args(["--exact", "sandbox::terminal::tests::a_panic_anywhere_restores_the_terminal", "--nocapture"])
            .env(IN_TERMINAL, "1")
            .stdin(terminal.slave.try_clone().unwrap())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        let (said, told) = (String::from_utf8_lossy(&copy.stdout), String::from_utf8_lossy(&copy.stderr));
        assert!(said.contains("1 passed") && told.contains("on purpose"), "{said}\n{told}");
        let after = tcgetattr(&terminal.slave).unwrap();
        assert_eq!(after.local_modes, before.local_modes);
        assert_eq!((after.input_modes, after.output_modes), (before.input_modes, before.output_modes));
    }
}
