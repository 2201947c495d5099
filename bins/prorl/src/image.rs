//! `prorl image`: what sandboxes start from, built, unpacked and looked after.

mod bar;
mod build;
mod gc;
mod list;
mod prefetch;
mod unpack;

use std::process::ExitCode;

pub(crate) use self::bar::Bar;
use prorl_sandbox::{
    SandboxUser,
    images::{UnpackLimits, Unpacker},
    store::{Digest, ImageEntry, ImageStore},
};

use crate::{
    output, sandboxes,
    stores::{StoreArgs, parse_size},
};

/// Arguments of `prorl image`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Build a .sif from a definition or from a template that comes with prorl.
    Build(build::Args),
    /// Unpack an image into the store, where sandboxes start from it without FUSE.
    Unpack(unpack::Args),
    /// Unpack every image that the tasks of a file name.
    Prefetch(prefetch::Args),
    /// Show what the store holds.
    List(list::Args),
    /// Remove what is not needed any more.
    Gc(gc::Args),
}

impl Command {
    /// Returns which store it needs, if it needs one.
    fn store(&self) -> Option<&StoreArgs> {
        match self {
            Self::Build(args) => args.store(),
            Self::Unpack(args) => Some(args.store()),
            Self::Prefetch(args) => Some(args.store()),
            Self::List(args) => Some(args.store()),
            Self::Gc(args) => Some(args.store()),
        }
    }
}

pub(crate) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    if args.command.store().is_some_and(StoreArgs::is_none) {
        return Ok(output::usage("--store none: this command needs a store of images"));
    }
    match args.command {
        Command::Build(args) => build::main(args).await,
        Command::Unpack(args) => unpack::main(args).await,
        Command::Prefetch(args) => prefetch::main(args).await,
        Command::List(args) => list::main(&args),
        Command::Gc(args) => gc::main(&args),
    }
}

/// How much of a digest is shown to people.
const SHORT_DIGITS: usize = 12;

/// Shortens a digest for people.
fn short(digest: &Digest) -> String {
    digest.hex().chars().take(SHORT_DIGITS).collect()
}

/// Writes the names of an image for people.
fn show_names(image: &ImageEntry) -> String {
    let names: Vec<_> = image.names.iter().map(ToString::to_string).collect();
    if names.is_empty() { "-".to_owned() } else { names.join(" ") }
}

/// How images are unpacked; flags of every command that does.
#[derive(Clone, Debug, clap::Args)]
struct UnpackArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Threads for one image [default: as many as processors].
    #[arg(long, value_name = "N")]
    threads: Option<std::num::NonZeroUsize>,
    /// Refuse an image that holds more than this, such as 50G [default: 1 TiB]. Above 1 GiB one that makes more than 200
    /// bytes of a packed byte is refused too. Limits count while an image is unpacked, not for one that the store has.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_image: Option<u64>,
    /// Refuse an image with more files than this, folders and links counted [default: 4,000,000].
    #[arg(long, value_name = "N")]
    max_files: Option<u64>,
    /// The apptainer or singularity program, for docker:// [default: looked for along PATH].
    #[arg(long, env = "PRORL_APPTAINER", value_name = "PATH")]
    apptainer: Option<std::path::PathBuf>,
    /// Speak plain HTTP to the registry of a docker:// image.
    #[arg(long)]
    no_https: bool,
    /// Number of the host user that sandboxes will be mapped to; for root only [default: that of nobody].
    #[arg(long, env = "PRORL_SANDBOX_USER", value_name = "UID")]
    sandbox_user: Option<u32>,
}

impl UnpackArgs {
    /// Whose the unpacked files are to be.
    fn owner(&self) -> anyhow::Result<Option<SandboxUser>> {
        sandboxes::owner(self.sandbox_user)
    }

    /// Makes what unpacks, `n_at_once` of which share the processors.
    fn unpacker(&self, store: ImageStore, n_at_once: usize) -> Unpacker {
        let defaults = UnpackLimits::default();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let share = std::num::NonZeroUsize::new(cores.div_ceil(n_at_once.max(1)));
        Unpacker {
            limits: UnpackLimits {
                max_entries: self.max_files.unwrap_or(defaults.max_entries),
                max_bytes: self.max_image.unwrap_or(defaults.max_bytes),
                ..defaults
            },
            threads: self.threads.or(share).unwrap_or(std::num::NonZeroUsize::MIN),
            apptainer: self.apptainer.clone(),
            no_https: self.no_https,
            ..Unpacker::new(store)
        }
    }
}
