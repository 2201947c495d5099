//! `prorl sandbox`: a sandbox from the command line.

mod arguments;
mod image;
mod session;
mod signals;
mod terminal;

use std::{
    ffi::OsString,
    io::{self, IsTerminal},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use prorl_core::hello::FakeRoot;
use prorl_sandbox::{
    Runtime, SandboxError, SandboxSpec,
    egress::{Egress, Gate},
};
use prorl_tools::host::{AttachSpec, ExecSpec, ToolClient, ToolError};

use self::{arguments::Wanted, session::End, signals::Signals};
use crate::{
    egress::ProxyUrl,
    limits::LimitArgs,
    output,
    sandboxes::{SandboxConfig, Sandboxes},
    stores::StoreArgs,
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
    /// What the sandbox is made from: `host` for this machine's own programs, the name of an image in the store, or a path: an
    /// unpacked image, or a .sif or squashfs, which is unpacked into the store first. One that begins with `/` or `.` is a path.
    image: PathBuf,
    /// The command; a shell when absent.
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
    /// Kind of sandbox; auto is namespace.
    #[arg(long, default_value = "auto", value_parser = ["auto", "namespace", "singularity"])]
    runtime: String,
    /// Be user 0 inside, without any right outside.
    #[arg(long)]
    fakeroot: bool,
    /// What can be reached: none, or what this machine can.
    #[arg(long, default_value = "none", value_parser = ["none", "host"])]
    network: String,
    /// Host that HTTP and HTTPS reach through this program, as `host`, `host:port` or `*.domain`; may be given again.
    #[arg(long, value_name = "HOST", conflicts_with = "network")]
    allow: Vec<String>,
    /// Host of --allow that may be at a private address, such as a mirror in the cluster; may be given again [default:
    /// `PRORL_EGRESS_PRIVATE`].
    #[arg(long, value_name = "HOST[:PORT]", value_delimiter = ',', requires = "allow")]
    egress_private: Vec<String>,
    /// HTTP proxy of the cluster by which the hosts of --allow are reached, as HOST:PORT or USER:PASSWORD@HOST:PORT; other users of
    /// this machine can see an argument, so a password belongs into the variable [default: `PRORL_EGRESS_PROXY`, or directly].
    #[arg(long, value_name = "URL", requires = "allow")]
    egress_proxy: Option<ProxyUrl>,
    /// Show a file or folder of this machine inside; may be given again.
    #[arg(long, value_name = "SRC:DST[:ro]")]
    bind: Vec<OsString>,
    /// Set a variable inside; may be given again. Other users of this machine can see it here: a secret belongs into
    /// --env-file.
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<OsString>,
    /// Set the variables of a file inside, one NAME=VALUE a line as it stands, without blank lines and those that begin
    /// with `#`.
    #[arg(long, value_name = "FILE")]
    env_file: Option<PathBuf>,
    /// Folder to run in [default: /workspace].
    #[arg(long, value_name = "DIR")]
    workdir: Option<OsString>,
    #[command(flatten)]
    limits: LimitArgs,
    /// Kill the command after this long and fail [default: never].
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<f64>,
    /// Host name inside [default: sandbox].
    #[arg(long, value_name = "NAME")]
    hostname: Option<OsString>,
    #[command(flatten)]
    sandboxes: SandboxConfig,
    #[command(flatten)]
    store: StoreArgs,
    /// Give the command a terminal [default: when standard input and output are terminals].
    #[arg(short, long, overrides_with = "no_tty")]
    tty: bool,
    /// Give the command pipes, with its standard error apart.
    #[arg(long, overrides_with = "tty")]
    no_tty: bool,
}

pub(crate) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Exec(args) => exec(&args).await,
    }
}

/// Runs one command in a sandbox of its own.
async fn exec(args: &ExecArgs) -> anyhow::Result<ExitCode> {
    let wanted = match Wanted::new(args) {
        Ok(wanted) => wanted,
        Err(problem) => return Ok(output::usage(format_args!("{problem:#}"))),
    };
    match run(args, wanted).await {
        Err(problem) if is_usage(&problem) => Ok(output::usage(format_args!("{problem:#}"))),
        ended => ended,
    }
}

async fn run(args: &ExecArgs, wanted: Wanted) -> anyhow::Result<ExitCode> {
    let Wanted { mut spec, command, workdir, limit, egress } = wanted;
    let sandboxes = Sandboxes::open(args.sandboxes.clone())?;
    sandboxes.guest.path().clone_into(&mut spec.guest);
    let runtime: Arc<dyn Runtime> = match args.runtime.as_str() {
        "singularity" => Arc::new(sandboxes.singularity()?),
        _ => Arc::new(sandboxes.namespace()),
    };
    let mut signals = Signals::take()?;
    let started = async {
        spec.image = image::find(&args.image, &args.store, &sandboxes).await?;
        anyhow::Ok(runtime.start(&spec).await?)
    };
    let started = tokio::select! {
        started = started => started,
        signal = signals.end() => return Ok(code(128 + signal)),
    };
    let mut sandbox = started?;
    let egress = match (egress, sandbox.take_proxy()) {
        (Some((rules, config)), Some(listener)) => {
            Some(Egress::serve(listener, Gate::new(Some(rules)), config).context("--allow")?)
        }
        _ => None,
    };
    let hello = &sandbox.facts().hello;
    if let Some(FakeRoot::Single { missing }) = &hello.fakeroot {
        output::note(format_args!(
            "prorl: user 0 is the only one inside, and changes of owner are pretended: {missing}"
        ));
    }
    let bash = hello.bash.clone();
    let client = ToolClient::new(sandbox.take_channel().context("the sandbox has no channel")?);
    let has_terminal = args.tty || (!args.no_tty && is_terminal());
    let ended = async {
        let command = match (command.is_empty(), bash) {
            (false, _) => command,
            (true, Some(bash)) => vec![bash],
            (true, None) => vec![find_sh(&client, args).await?],
        };
        let attach = AttachSpec {
            cwd: workdir,
            terminal: has_terminal.then(|| terminal::size().unwrap_or_default()),
            env: terminal_type(has_terminal, &spec),
            ..AttachSpec::new(command)
        };
        session::run(&client, &attach, limit, &mut signals).await
    };
    let ended = ended.await;
    for exceeded in sandbox.take_exceeded() {
        output::note(format_args!("prorl: {exceeded}"));
    }
    drop(client);
    if let Some(egress) = egress {
        egress.end().await;
    }
    let gone = sandbox.shutdown(GRACE).await;
    let end = ended?;
    gone?;
    match end {
        End::Exited(status) => Ok(code(status)),
        End::Signal(signal) => Ok(code(128 + signal)),
        End::TimedOut => bail!("the command was killed after {limit:?}"),
    }
}

/// Tells whether the arguments alone are at fault.
fn is_usage(problem: &anyhow::Error) -> bool {
    match problem.downcast_ref() {
        Some(SandboxError::Invalid { .. }) => true,
        // A kind of image that a runtime does not take; what the system does not support has its number.
        Some(SandboxError::Image { source, .. }) => {
            source.kind() == io::ErrorKind::Unsupported && source.raw_os_error().is_none()
        }
        _ => false,
    }
}

/// Returns the shell of an image without bash.
async fn find_sh(client: &ToolClient, args: &ExecArgs) -> anyhow::Result<String> {
    match client.exec(&ExecSpec::new(["sh", "-c", ":"]), GRACE).await {
        Err(problem @ ToolError::Failed { .. }) => Err(problem).with_context(|| {
            format!("image {} has no bash and no sh to start; name a command after `--`", args.image.display())
        }),
        Err(problem) => Err(problem.into()),
        Ok(_) => Ok("sh".to_owned()),
    }
}

fn is_terminal() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
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
