//! `prorl status` and `prorl cancel`: a running server from the command line.

use std::process::ExitCode;

use prorl_client::Client;
use prorl_core::{JobId, Secret, status::ServiceStatus};

use crate::output;

/// Where the server is and how to be let in.
#[derive(clap::Args)]
pub(crate) struct ServerArgs {
    /// The server's address.
    #[arg(long, env = "PRORL_SERVER", default_value = "http://127.0.0.1:8006", value_name = "URL")]
    server: String,
    /// The server's bearer token.
    #[arg(long, env = "PRORL_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    token: Option<String>,
}

impl ServerArgs {
    pub(crate) fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::new(&self.server, self.token.clone().map(Secret::new))?)
    }
}

/// Arguments of `prorl status`.
#[derive(clap::Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// Print the answer as JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `prorl cancel`.
#[derive(clap::Args)]
pub(crate) struct CancelArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// The job.
    job_id: String,
    /// Print the answer as JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) async fn status(args: StatusArgs) -> anyhow::Result<ExitCode> {
    let status = args.server.client()?.status().await?;
    if args.json {
        output::say(serde_json::to_string(&status)?);
    } else {
        show(&status);
    }
    Ok(ExitCode::SUCCESS)
}

fn show(status: &ServiceStatus) {
    let state = serde_json::to_value(status.state).ok();
    let state = state.as_ref().and_then(serde_json::Value::as_str).unwrap_or_default();
    output::say(format_args!("prorl {} {state} for {:.0} s", status.version, status.uptime));
    for (name, stage) in [("init", status.stages.init), ("run", status.stages.run), ("eval", status.stages.eval)] {
        output::say(format_args!("{name:5} {} queued, {}/{} active", stage.queued, stage.active, stage.workers));
    }
    let jobs = status.jobs;
    output::say(format_args!(
        "jobs  {} accepted, {} active, {} completed, {} failed, {} timed out, {} cancelled",
        jobs.accepted, jobs.active, jobs.completed, jobs.failed, jobs.timeout, jobs.cancelled
    ));
    for backend in &status.backends {
        let health = if backend.healthy { "healthy" } else { backend.reason.as_deref().unwrap_or("not healthy") };
        output::say(format_args!(
            "llm   {} {} version {}, {} active, {health}",
            backend.address, backend.kind, backend.weight_version, backend.active
        ));
    }
    for stuck in &status.stuck {
        output::say(format_args!(
            "waits {} in {} for {}, {:.0} s",
            stuck.job_id, stuck.stage, stuck.waiting_for, stuck.seconds
        ));
    }
}

pub(crate) async fn cancel(args: CancelArgs) -> anyhow::Result<ExitCode> {
    let Ok(job_id) = JobId::new(args.job_id.as_str()).map_err(output::usage) else { return Ok(ExitCode::from(2)) };
    let answer = args.server.client()?.cancel(&job_id).await?;
    if args.json {
        output::say(serde_json::to_string(&answer)?);
    } else {
        output::say(format_args!("cancel requested for job {job_id}, which was in state {}", answer.state));
    }
    Ok(ExitCode::SUCCESS)
}
