//! An agent loop: tools in a sandbox, called one after the other, as a policy would. See the README.

mod count_words;
mod policy;

use std::{io::Write, sync::Arc, time::Duration};

use anyhow::Context;
use prorl_guest::Guest;
use prorl_sandbox::{NamespaceConfig, NamespaceRuntime, Node, NodeConfig, Runtime, SandboxSpec};
use prorl_tools::host::{ToolClient, ToolContext, Toolbox};

use crate::count_words::CountWords;

/// How long one call may take.
const CALL_LIMIT: Duration = Duration::from_mins(1);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let guest = Guest::install().context("the guest program cannot be made executable")?;
    let node = Node::open(NodeConfig::new(guest.path()))?;
    let runtime = NamespaceRuntime::new(node, NamespaceConfig::default());
    let mut sandbox = runtime.start(&SandboxSpec::new(guest.path())).await?;
    let client = ToolClient::new(sandbox.take_channel().context("a new sandbox has its channel")?);

    let toolbox = Toolbox::from_names(["bash", "ipython", "editor", "finish"])?.with(Arc::new(CountWords));
    let answer = rollout(&client, &toolbox).await?;

    let mut out = std::io::stdout().lock();
    writeln!(out, "tools: {}", toolbox.names().collect::<Vec<_>>().join(", "))?;
    writeln!(out, "answer: {}", answer.unwrap_or_else(|| "none".to_owned()))?;
    // Nothing is left of the sandbox when this returns.
    sandbox.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}

/// Carries out calls until one of them finishes, and returns the answer.
///
/// # Errors
/// When the sandbox is gone: then the trajectory is no sample, whatever it was about to be.
async fn rollout(client: &ToolClient, toolbox: &Toolbox) -> anyhow::Result<Option<String>> {
    let mut out = std::io::stdout().lock();
    let context = ToolContext { silence: Some(Duration::from_secs(10)), ..ToolContext::new(client, CALL_LIMIT) };
    for (name, arguments) in policy::calls() {
        writeln!(out, "> {name} {}", serde_json::to_string(&arguments)?)?;
        let result = toolbox.call(&context, name, &arguments).await?;
        writeln!(out, "{}", result.content.text().trim_end())?;
        writeln!(out, "{}", if result.is_error { "(error)\n" } else { "" })?;
        if result.finish.is_some() {
            return Ok(result.finish);
        }
    }
    Ok(None)
}
