//! `prorl sandbox`: a sandbox from the command line.

mod session;
mod signals;
mod terminal;

use std::{
    ffi::{OsStr, OsString},
    io::IsTerminal,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use prorl_core::hello::FakeRoot;
use prorl_sandbox::{Bind, Image, Network, Runtime, SandboxError, SandboxSpec};
use prorl_tools::host::{AttachSpec, ToolClient};

use self::{session::End, signals::Signals};
use crate::{
    output,
    sandboxes::{SandboxConfig, Sandboxes},
};

/// How long a sandbox may take to end by itself, once its command has.
const GRACE: Duration = Duration::from_secs(2);

/// Arguments of `prorl sandbox`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Run a command, or a shell, in a fresh sandbox.
    ///
    /// The sandbox is made for this command and is gone with it, with everything that was written outside of --bind. The exit
    /// code is the command's, 128 and the signal's number when a signal ended it; 1 when there was no sandbox or no such
    /// command, 2 for wrong usage.
    #[command(after_help = EXAMPLES)]
    Exec(Box<ExecArgs>),
}

const EXAMPLES: &str = "\
Examples:
  prorl sandbox exec host                                    a shell on this machine's programs
  prorl sandbox exec images/debian -- cat /etc/os-release    a command in an unpacked image
  prorl sandbox exec --fakeroot debian.sif -- apt-get moo    the same in a packed one, as user 0
  prorl sandbox exec --bind data:/data:ro host -- wc -l /data/tasks.jsonl
  echo 'print(6 * 7)' | prorl sandbox exec host -- python3 -";

/// Arguments of `prorl sandbox exec`.
#[derive(clap::Args)]
pub(crate) struct ExecArgs {
    /// What the sandbox is made from: `host` for this machine's own programs, an unpacked image (`./host` for a folder of that
    /// name), or a .sif or squashfs file.
    image: PathBuf,
    /// The command; a shell when absent.
    #[arg(last = true, value_name = "CMD")]
    command: Vec<String>,
    /// Kind of sandbox; auto takes singularity for packed images.
    #[arg(long, default_value = "auto", value_parser = ["auto", "namespace", "singularity"])]
    runtime: String,
    /// Be user 0 inside, without any right outside.
    #[arg(long)]
    fakeroot: bool,
    /// What can be reached: none, or what this machine can.
    #[arg(long, default_value = "none", value_parser = ["none", "host"])]
    network: String,
    /// Show a file or folder of this machine inside; may be given again.
    #[arg(long, value_name = "SRC:DST[:ro]")]
    bind: Vec<OsString>,
    /// Set a variable inside; may be given again. Other users of this machine can see it here: a secret belongs into
    /// --env-file.
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Set the variables of a file inside, one NAME=VALUE a line as it stands, without blank lines and those that begin
    /// with `#`.
    #[arg(long, value_name = "FILE")]
    env_file: Option<PathBuf>,
    /// Folder to run in [default: /workspace].
    #[arg(long, value_name = "DIR")]
    workdir: Option<String>,
    /// Size of /tmp and of /dev/shm, in MiB [default: 512].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_MIB))]
    tmp_mb: Option<u64>,
    /// Size of everything else that can be written, in MiB [default: 2048].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_MIB))]
    layer_mb: Option<u64>,
    /// Kill the command after this long and fail [default: never].
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<f64>,
    /// Host name inside [default: sandbox].
    #[arg(long, value_name = "NAME")]
    hostname: Option<String>,
    /// The apptainer or singularity program [default: looked for along PATH].
    #[arg(long, env = "PRORL_APPTAINER", value_name = "PATH")]
    apptainer: Option<PathBuf>,
    /// Local folder for what the sandbox needs while it lives [default: prorl-UID in TMPDIR].
    #[arg(long, env = "PRORL_RUN_DIR", value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Number of the host user that the sandbox is mapped to when started by root [default: that of nobody].
    #[arg(long, env = "PRORL_SANDBOX_USER", value_name = "UID")]
    sandbox_user: Option<u32>,
    /// Give the command a terminal [default: when standard input and output are terminals].
    #[arg(short, long, overrides_with = "no_tty")]
    tty: bool,
    /// Give the command pipes, with its standard error apart.
    #[arg(long, overrides_with = "tty")]
    no_tty: bool,
}

const MAX_MIB: u64 = u64::MAX >> 20;

pub(crate) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Exec(args) => exec(&args).await,
    }
}

/// Runs one command in a sandbox of its own.
async fn exec(args: &ExecArgs) -> anyhow::Result<ExitCode> {
    let (mut spec, limit) = match (spec(args), limit(args.timeout)) {
        (Ok(spec), Ok(limit)) => (spec, limit),
        (Err(problem), _) | (_, Err(problem)) => return Ok(output::usage(format_args!("{problem:#}"))),
    };
    spec.image = image(&args.image);
    let sandboxes = Sandboxes::open(SandboxConfig {
        run_dir: args.run_dir.clone(),
        user: args.sandbox_user,
        apptainer: args.apptainer.clone(),
        max_starting: None,
    })?;
    sandboxes.guest.path().clone_into(&mut spec.guest);
    let runtime = runtime(&sandboxes, &args.runtime, &spec.image)?;
    let mut signals = Signals::take()?;
    let started = tokio::select! {
        started = runtime.start(&spec) => started,
        signal = signals.end() => return Ok(code(128 + signal)),
    };
    let mut sandbox = match started {
        Err(problem @ SandboxError::Invalid { .. }) => return Ok(output::usage(problem)),
        started => started?,
    };
    if let Some(FakeRoot::Single { missing }) = &sandbox.facts().hello.fakeroot {
        output::note(format_args!(
            "prorl: user 0 is the only one inside, and changes of owner are pretended: {missing}"
        ));
    }
    let client = ToolClient::new(sandbox.take_channel().context("the sandbox has no channel")?);
    let has_terminal = args.tty || (!args.no_tty && std::io::stdin().is_terminal() && std::io::stdout().is_terminal());
    let shell = || vec![sandbox.facts().hello.bash.clone().unwrap_or_else(|| "sh".to_owned())];
    let command = if args.command.is_empty() { shell() } else { args.command.clone() };
    let attach = AttachSpec {
        cwd: args.workdir.clone(),
        terminal: has_terminal.then(|| terminal::size().unwrap_or_default()),
        env: terminal_type(has_terminal, &spec),
        ..AttachSpec::new(command)
    };
    let ended = session::run(&client, &attach, limit, &mut signals).await;
    drop(client);
    let gone = sandbox.shutdown(GRACE).await;
    let end = ended?;
    gone?;
    match end {
        End::Exited(status) => Ok(code(status)),
        End::Signal(signal) => Ok(code(128 + signal)),
        End::TimedOut => bail!("the command was killed after {limit:?}"),
    }
}

/// Makes the runtime that was asked for, or that the image needs. It refuses an image that it cannot start.
fn runtime(sandboxes: &Sandboxes, name: &str, image: &Image) -> anyhow::Result<Arc<dyn Runtime>> {
    if name == "singularity" || (name == "auto" && matches!(image, Image::File(_))) {
        return Ok(Arc::new(sandboxes.singularity()?));
    }
    Ok(Arc::new(sandboxes.namespace()))
}

/// Returns the sandbox that the arguments describe, but for its image and guest.
///
/// # Errors
/// What is wrong with them; never a variable's value.
fn spec(args: &ExecArgs) -> anyhow::Result<SandboxSpec> {
    let mut spec = SandboxSpec::new(PathBuf::new());
    spec.fakeroot = args.fakeroot;
    spec.network = if args.network == "host" { Network::Host } else { Network::None };
    spec.binds = args.bind.iter().map(|bind| parse_bind(bind)).collect::<Result<_, _>>()?;
    if let Some(path) = &args.env_file {
        let text = std::fs::read_to_string(path).with_context(|| format!("--env-file {}", path.display()))?;
        spec.env = parse_env_file(&text).with_context(|| format!("--env-file {}", path.display()))?;
    }
    for variable in &args.env {
        spec.env.push(parse_variable(variable).context("--env")?);
    }
    spec.tmp_bytes = args.tmp_mb.map_or(spec.tmp_bytes, |mib| mib << 20);
    spec.layer_bytes = args.layer_mb.map_or(spec.layer_bytes, |mib| mib << 20);
    if let Some(name) = &args.hostname {
        spec.hostname.clone_from(name);
    }
    Ok(spec)
}

fn image(given: &Path) -> Image {
    match given {
        path if path == Path::new("host") => Image::Host,
        path if path.is_file() => Image::File(path.to_owned()),
        path => Image::Directory(path.to_owned()),
    }
}

fn limit(seconds: Option<f64>) -> anyhow::Result<Duration> {
    let Some(seconds) = seconds else { return Ok(Duration::MAX) };
    let limit = Duration::try_from_secs_f64(seconds).ok().filter(|limit| !limit.is_zero());
    limit.with_context(|| format!("--timeout: expected seconds above 0, found {seconds}"))
}

/// Takes `SRC:DST[:ro]` apart. Only the last colon before a slash counts, so that a source may hold colons.
fn parse_bind(given: &OsStr) -> anyhow::Result<Bind> {
    let text = given.as_bytes();
    let (text, writable) = text.strip_suffix(b":ro").map_or((text, true), |text| (text, false));
    let at = text.windows(2).rposition(|pair| pair == b":/");
    let at = at.filter(|at| *at > 0);
    let at = at.with_context(|| format!("--bind {}: expected SRC:DST[:ro] with an absolute DST", given.display()))?;
    let path = |bytes| Path::new(OsStr::from_bytes(bytes));
    let source = std::path::absolute(path(&text[..at])).with_context(|| format!("--bind {}", given.display()))?;
    Ok(Bind { source, target: path(&text[at + 1..]).to_owned(), writable })
}

fn parse_variable(given: &str) -> anyhow::Result<(String, String)> {
    // What has no '=' may be a secret all the same.
    let (name, value) = given.split_once('=').context("expected NAME=VALUE, found no '='")?;
    ensure!(!name.is_empty(), "expected NAME=VALUE, found no name");
    Ok((name.to_owned(), value.to_owned()))
}

fn parse_env_file(text: &str) -> anyhow::Result<Vec<(String, String)>> {
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'))
        .map(|(idx, line)| parse_variable(line).with_context(|| format!("line {}", idx + 1)))
        .collect()
}

/// Returns the kind of this terminal as a variable for the command, unless the arguments name one.
fn terminal_type(has_terminal: bool, spec: &SandboxSpec) -> Vec<(String, String)> {
    let is_said = spec.env.iter().any(|(name, _)| name == "TERM");
    let kind = std::env::var("TERM").ok().filter(|kind| has_terminal && !is_said && !kind.is_empty());
    kind.map(|kind| ("TERM".to_owned(), kind)).into_iter().collect()
}

/// Returns an exit code; the kernel keeps eight bits of a process's.
fn code(status: i32) -> ExitCode {
    ExitCode::from(u8::try_from(status & 0xff).unwrap_or(u8::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind(text: &str) -> Option<(String, String, bool)> {
        let bind = parse_bind(OsStr::new(text)).ok()?;
        Some((bind.source.to_str().unwrap().to_owned(), bind.target.to_str().unwrap().to_owned(), bind.writable))
    }

    #[test]
    fn a_bind_may_have_colons_in_its_source() {
        let expect = |source: &str, target: &str, writable| Some((source.to_owned(), target.to_owned(), writable));
        assert_eq!(bind("/a:/b"), expect("/a", "/b", true));
        assert_eq!(bind("/a:/b:ro"), expect("/a", "/b", false));
        assert_eq!(bind("/a:b:c:/d"), expect("/a:b:c", "/d", true));
        assert_eq!(bind("/a:/b:/c:ro"), expect("/a:/b", "/c", false));
        let here = std::env::current_dir().unwrap();
        assert_eq!(bind("a:/b"), expect(here.join("a").to_str().unwrap(), "/b", true));
        for wrong in ["", "/a", "/a:b", ":/b", "/a:ro"] {
            assert_eq!(bind(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn variables_are_taken_as_they_stand_and_never_told() {
        let text = "# a comment\nA=1\n\nB= two = \"2\" \nC=\n";
        let expected = [("A", "1"), ("B", " two = \"2\" "), ("C", "")];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(parse_env_file(text).unwrap(), expected);
        for wrong in ["A=1\ns3cret", "=s3cret"] {
            let error = format!("{:#}", parse_env_file(wrong).unwrap_err());
            assert!(error.contains("line ") && !error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn a_limit_is_a_time() {
        assert_eq!(limit(None).unwrap(), Duration::MAX);
        assert_eq!(limit(Some(1.5)).unwrap(), Duration::from_millis(1500));
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(limit(Some(wrong)).is_err(), "{wrong}");
        }
    }
}
