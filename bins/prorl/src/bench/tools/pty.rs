//! The least that a shell in a terminal takes: a command is written with an `echo` of a word behind it, and what comes is read
//! to that word. Nothing keeps a command from printing the word, from ending the shell, or from waiting for ever.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::AsFd,
    os::unix::net::UnixStream as Socket,
    process::{Child, Command, Stdio},
    thread::{self, JoinHandle},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    pty::openpty,
    sys::termios::{LocalFlags, OutputFlags, SetArg, tcgetattr, tcsetattr},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

/// How long it is waited for output, in milliseconds.
const LIMIT_MS: u16 = 60_000;

/// A bash in a terminal.
pub(super) struct Shell {
    child: Child,
    terminal: File,
    n_commands: u64,
    buffer: Vec<u8>,
}

impl Shell {
    pub(super) fn start() -> io::Result<Self> {
        let pty = openpty(None, None)?;
        let mut settings = tcgetattr(&pty.slave)?;
        settings.output_flags.remove(OutputFlags::OPOST);
        settings.local_flags.remove(LocalFlags::ECHO);
        tcsetattr(&pty.slave, SetArg::TCSANOW, &settings)?;
        let end = || pty.slave.try_clone().map(Stdio::from);
        let child = Command::new("setsid")
            .args(["--ctty", "bash", "--noprofile", "--norc", "--noediting", "-i"])
            .stdin(end()?)
            .stdout(end()?)
            .stderr(end()?)
            .spawn()?;
        drop(pty.slave);
        let terminal = File::from(pty.master);
        let mut shell = Self { child, terminal, n_commands: 0, buffer: vec![0; 64 * 1024] };
        shell.run("PS1=; PS2=; unset PROMPT_COMMAND; set +m +o history")?;
        Ok(shell)
    }

    /// Runs a command; returns what it printed and its exit code.
    pub(super) fn run(&mut self, command: &str) -> io::Result<(Vec<u8>, i32)> {
        self.n_commands += 1;
        let word = format!("@@{}@@ ", self.n_commands);
        self.terminal.write_all(format!("{command}; echo '{word}'$?\n").as_bytes())?;
        let mut output = Vec::new();
        loop {
            let mut fds = [PollFd::new(self.terminal.as_fd(), PollFlags::POLLIN)];
            if poll(&mut fds, PollTimeout::from(LIMIT_MS))? == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let n_bytes = self.terminal.read(&mut self.buffer)?;
            // The word may be cut in two, and comes last.
            let from = output.len().saturating_sub(word.len() + 4);
            output.extend_from_slice(&self.buffer[..n_bytes]);
            if output.ends_with(b"\n")
                && let Some(idx) = find(&output[from..], word.as_bytes())
            {
                let code = String::from_utf8_lossy(&output[from + idx + word.len()..]).trim().parse();
                output.truncate(from + idx);
                return Ok((output, code.map_err(io::Error::other)?));
            }
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn find(text: &[u8], word: &[u8]) -> Option<usize> {
    text.windows(word.len()).position(|window| window == word)
}

/// The same behind a socket with a thread at its other end: what any tool takes that is asked from another process.
pub(super) struct Behind {
    socket: UnixStream,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Behind {
    pub(super) fn start() -> io::Result<Self> {
        let (ours, theirs) = Socket::pair()?;
        ours.set_nonblocking(true)?;
        let mut shell = Shell::start()?;
        let thread = thread::Builder::new().name("bench-pty".to_owned()).spawn(move || serve(theirs, &mut shell))?;
        Ok(Self { socket: UnixStream::from_std(ours)?, thread: Some(thread) })
    }

    pub(super) async fn run(&mut self, command: &str) -> io::Result<(Vec<u8>, i32)> {
        let n_bytes = u32::try_from(command.len()).map_err(io::Error::other)?;
        self.socket.write_all(&[&n_bytes.to_le_bytes(), command.as_bytes()].concat()).await?;
        let n_bytes = self.socket.read_u32_le().await?;
        let code = self.socket.read_i32_le().await?;
        let mut output = vec![0; usize::try_from(n_bytes).map_err(io::Error::other)?];
        self.socket.read_exact(&mut output).await?;
        Ok((output, code))
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        let fd = self.socket.as_fd();
        // The thread reads the end of it, and nothing else.
        let _shut = nix::sys::socket::shutdown(std::os::fd::AsRawFd::as_raw_fd(&fd), nix::sys::socket::Shutdown::Both);
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

/// Answers commands until the socket is closed.
fn serve(mut socket: Socket, shell: &mut Shell) -> io::Result<()> {
    let mut length = [0; 4];
    while socket.read_exact(&mut length).is_ok() {
        let mut command = vec![0; usize::try_from(u32::from_le_bytes(length)).map_err(io::Error::other)?];
        socket.read_exact(&mut command)?;
        let (output, code) = shell.run(&String::from_utf8_lossy(&command))?;
        let n_bytes = u32::try_from(output.len()).map_err(io::Error::other)?;
        let head = [n_bytes.to_le_bytes(), code.to_le_bytes()].concat();
        socket.write_all(&[&head[..], &output].concat())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn commands_are_answered_by_their_own_output() {
        let mut bare = Shell::start().unwrap();
        let mut behind = Behind::start().unwrap();
        for n in 0..20 {
            let command = format!("echo line {n}; (exit {n})");
            let right = (format!("line {n}\n").into_bytes(), n);
            assert_eq!(bare.run(&command).unwrap(), right);
            assert_eq!(behind.run(&command).await.unwrap(), right);
        }
        assert_eq!(bare.run("seq 1 20000").unwrap().0.len(), 108_894);
        assert_eq!(bare.run("true").unwrap(), (Vec::new(), 0));
    }
}
