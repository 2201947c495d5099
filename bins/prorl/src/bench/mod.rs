//! `prorl bench`: our figures beside those of bare tools, taken in turns in one run. A figure is told, beside its goal if it has
//! one, and never an error.

mod bare;
mod figures;
mod goals;
mod images;
mod limits;
mod live;
mod machine;
mod memory;
mod report;
mod runtimes;
mod sandbox;
mod tools;

use std::process::ExitCode;

/// Arguments of `prorl bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Start, end and size of sandboxes of each runtime, beside bubblewrap and a bare `apptainer exec`.
    Sandbox(sandbox::Args),
    /// Unpacking, forking and building of images, beside unsquashfs, plain starts, and mksquashfs with Apptainer's `sif`.
    Images(images::Args),
    /// What limits cost, and what they keep of a fork bomb and its like from their neighbours; beside sandboxes without limits.
    Limits(limits::Args),
    /// What a tool call takes, beside a bare terminal, tmux and Jupyter; or, with `--conformance`, who keeps which promises.
    Tools(tools::Args),
}

pub(crate) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.what {
        What::Sandbox(args) => sandbox::main(args).await,
        What::Images(args) => images::main(args).await,
        What::Limits(args) => limits::main(args).await,
        What::Tools(args) => tools::main(args).await,
    }
}
