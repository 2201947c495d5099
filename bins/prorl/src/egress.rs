//! By which way hosts are reached that a sandbox may reach.

use prorl_sandbox::egress::{EgressConfig, RuleError, Rules, Upstream};
use serde::{Deserialize, Serialize, Serializer};

/// The URL of a proxy, as it was given. It may hold a password, so it is shown without what stands before the host.
#[derive(Clone, Deserialize)]
#[serde(transparent)]
pub(crate) struct ProxyUrl(String);

impl From<String> for ProxyUrl {
    fn from(url: String) -> Self {
        Self(url)
    }
}

impl Serialize for ProxyUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let shown = match self.0.rsplit_once('@') {
            Some((_user, host)) => format!("[redacted]@{host}"),
            None => self.0.clone(),
        };
        serializer.serialize_str(&shown)
    }
}

/// Reads the hosts that may be at private addresses, and the proxy; `keys` is what the two are called where they were given.
///
/// # Errors
/// What is wrong with which of them; never a password.
pub(crate) fn config(private: &[String], proxy: Option<&ProxyUrl>, keys: [&str; 2]) -> anyhow::Result<EgressConfig> {
    let of = |key: &str, error: &RuleError| anyhow::anyhow!("{key}: {error}");
    let private = Rules::parse(private).map_err(|error| of(keys[0], &error))?;
    let upstream = proxy.map(|proxy| proxy.0.parse::<Upstream>()).transpose().map_err(|error| of(keys[1], &error))?;
    let config = EgressConfig { private, upstream, ..EgressConfig::default() };
    config.check_private().map_err(|error| of(keys[0], &error))?;
    Ok(config)
}
