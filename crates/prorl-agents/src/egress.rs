//! What the sandboxes of a job may reach, stage by stage.

use prorl_core::{
    Malformed, Stage,
    network::{NetworkChoice, Reach},
};
use prorl_sandbox::egress::{EgressConfig, Gate, Rules};

/// The port of a sandbox's loopback interface at which its proxy is found; by the variables that name it, so that no program
/// has to know.
pub(crate) const PROXY_PORT: u16 = 3128;

/// Whether a server lets jobs reach hosts that they name, and how.
#[derive(Clone, Debug)]
pub struct EgressPolicy {
    /// Whether it does at all.
    pub enabled: bool,
    /// The operator's own mirrors and proxy, and the limits of connections. All sandboxes share its resolver.
    pub config: EgressConfig,
}

impl Default for EgressPolicy {
    /// Lets jobs reach public addresses.
    fn default() -> Self {
        Self { enabled: true, config: EgressConfig::default() }
    }
}

impl EgressPolicy {
    /// Checks what an instance asks for, and returns the way out that its sandboxes get; nothing where it asks for none.
    ///
    /// # Errors
    /// Names the list and the entry that is wrong, or says that the server lets nobody out.
    pub fn way(&self, network: &NetworkChoice) -> Result<Option<Way>, Malformed> {
        let lists = network.lists();
        if let Some((field, _)) = lists.first()
            && !self.enabled
        {
            let problem = "this server lets no job reach other hosts; expected \"none\"";
            return Err(Malformed::new(format!("instance.{field}"), problem));
        }
        for (field, list) in &lists {
            let rules = Rules::parse(*list).and_then(|rules| self.config.check(&rules));
            rules.map_err(|error| Malformed::new(format!("instance.{field}"), error.to_string()))?;
        }
        if lists.is_empty() {
            return Ok(None);
        }
        // Refusals name the list that they mean.
        let at = |stage: Stage| match network.at(stage) {
            Reach::Allow(list) => {
                let of_all = matches!(network, NetworkChoice::Allow(_));
                let name = if of_all { "network.allow".to_owned() } else { format!("network.{stage}.allow") };
                Rules::parse(list).unwrap_or_default().named(&name) // as just checked
            }
            Reach::None | Reach::Host => Rules::default().named(&format!("network.{stage}")),
        };
        let [init, run, eval] = [Stage::Init, Stage::Run, Stage::Eval].map(at);
        Ok(Some(Way { init, run, eval, config: self.config.clone() }))
    }
}

/// The way out of a job's sandboxes.
#[derive(Clone, Debug)]
pub struct Way {
    init: Rules,
    run: Rules,
    eval: Rules,
    pub(crate) config: EgressConfig,
}

impl Way {
    /// Has a gate allow what a stage may reach; nothing between stages.
    pub(crate) fn open(&self, gate: &Gate, stage: Option<Stage>) {
        let rules = stage.map(|stage| match stage {
            Stage::Init => &self.init,
            Stage::Run => &self.run,
            Stage::Eval => &self.eval,
        });
        gate.set(rules.cloned());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn way(policy: &EgressPolicy, network: &Value) -> Result<Option<Way>, String> {
        policy.way(&NetworkChoice::parse(network).unwrap()).map_err(|problem| problem.to_string())
    }

    #[test]
    fn each_stage_has_its_own_list() {
        let policy = EgressPolicy::default();
        for nothing in [json!("none"), json!("host"), json!({"init": "none"})] {
            assert!(way(&policy, &nothing).unwrap().is_none(), "{nothing}");
        }
        let network = json!({"init": {"allow": ["pypi.example"]}, "eval": {"allow": ["*.files.example:8443"]}});
        let way = way(&policy, &network).unwrap().unwrap();
        assert_eq!(way.init.to_string(), "pypi.example");
        assert!(way.run.is_empty());
        assert_eq!(way.eval.to_string(), "*.files.example:8443");
    }

    #[test]
    fn what_cannot_be_had_is_refused_by_name() {
        let policy = EgressPolicy::default();
        for (network, expected) in [
            (json!({"allow": ["a.example", "10.0.0.0/8"]}), "instance.network.allow: \"10.0.0.0/8\": it is a range"),
            (json!({"run": {"allow": ["*"]}}), "instance.network.run.allow: \"*\": it is every host"),
            (json!({"eval": {"allow": ["10.0.0.1"]}}), "instance.network.eval.allow: \"10.0.0.1\": a private address"),
            (
                json!({"init": {"allow": ["169.254.169.254"]}}),
                "\"169.254.169.254\": a metadata service, which nothing opens",
            ),
            (
                json!({"allow": ["localhost:8006"]}),
                "instance.network.allow: \"localhost:8006\": a name of this machine itself, which is refused unless the operator",
            ),
        ] {
            let problem = way(&policy, &network).unwrap_err();
            assert!(problem.contains(expected), "{problem}");
        }
        let shut = EgressPolicy { enabled: false, ..policy };
        assert!(way(&shut, &json!("none")).unwrap().is_none());
        let problem = way(&shut, &json!({"run": {"allow": ["a.example"]}})).unwrap_err();
        assert_eq!(problem, "instance.network.run.allow: this server lets no job reach other hosts; expected \"none\"");
    }
}
