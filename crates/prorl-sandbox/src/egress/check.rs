//! What of a list can be refused before anybody asks for it.

use std::net::{IpAddr, Ipv4Addr};

use super::{
    EgressConfig, Rule, RuleError, Rules,
    address::{self, Kind},
    host::{Destination, Host, METADATA},
};

/// Who opens what nobody opens.
const NEVER: &str = "which nothing opens";

impl EgressConfig {
    /// Checks that nothing is listed that would be refused whenever it is asked for: an address that is not public, or a name that
    /// can only be this machine's, if [`private`](Self::private) does not lift it; and what nothing lifts. What other names
    /// will stand for is not known before.
    ///
    /// # Errors
    /// Names the first such entry.
    pub fn check(&self, rules: &Rules) -> Result<(), RuleError> {
        rules.iter().try_for_each(|rule| {
            let Some((address, what)) = never_or(rule)? else { return Ok(()) };
            let host = rule.host();
            let is_lifted = |port| {
                let to = Destination { host: host.clone(), port };
                self.refuses(&to, address, address::kind(address)).is_none()
            };
            if rule.ports().into_iter().any(is_lifted) {
                return Ok(());
            }
            Err(refusal(rule, &format!("{what}, which is refused unless the operator names it as private")))
        })
    }

    /// Checks that [`private`](Self::private) names nothing that it cannot lift: metadata services, link-local
    /// addresses, and what means no single machine.
    ///
    /// # Errors
    /// Names the first such entry.
    pub fn check_private(&self) -> Result<(), RuleError> {
        self.private.iter().try_for_each(|rule| match never_or(rule)? {
            Some(_) if rule.is_wildcard() => {
                Err(refusal(rule, "every name there is this machine's; expected the very name that jobs list"))
            }
            _ => Ok(()),
        })
    }
}

/// Returns an address that an entry means, and what it is, where that is not the internet's.
///
/// # Errors
/// When nothing opens it.
fn never_or(rule: &Rule) -> Result<Option<(IpAddr, &'static str)>, RuleError> {
    let (address, what) = match rule.host() {
        host if host.is_metadata() => return Err(refusal(rule, &format!("{METADATA}, {NEVER}"))),
        Host::Address(address) => match address::kind(address) {
            Kind::Public => return Ok(None),
            Kind::Never(what) => return Err(refusal(rule, &format!("{what}, {NEVER}"))),
            Kind::Private(what) | Kind::Local(what) => (address, what),
        },
        host @ Host::Name(_) if host.is_loopback() => (Ipv4Addr::LOCALHOST.into(), "a name of this machine itself"),
        Host::Name(_) => return Ok(None),
    };
    Ok(Some((address, what)))
}

fn refusal(rule: &Rule, problem: &str) -> RuleError {
    RuleError { entry: rule.to_string(), problem: problem.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(private: &[&str]) -> EgressConfig {
        EgressConfig { private: Rules::parse(private).unwrap(), ..EgressConfig::default() }
    }

    #[test]
    fn names_of_this_machine_are_refused_unless_the_operator_names_them() {
        let names = [
            "localhost",
            "LOCALHOST.:8080",
            "app.localhost",
            "*.app.localhost",
            "localhost.localdomain",
            "localhost6",
            "ip6-localhost",
        ];
        for entry in names {
            let error = with(&["other.example", "10.0.0.1"]).check(&Rules::parse([entry]).unwrap()).unwrap_err();
            let expected = "a name of this machine itself, which is refused unless the operator names it as private";
            assert_eq!(error.problem, expected, "{entry}");
        }
        for (private, entry, is_lifted) in [
            ("localhost:8080", "localhost:8080", true),
            ("127.0.0.1:8080", "localhost:8080", true),
            ("app.localhost", "app.localhost", true),
            ("localhost:8080", "localhost:8081", false),
            ("localhost:8080", "app.localhost:8080", false),
            ("localhost:8080", "127.0.0.1:8080", false),
        ] {
            let config = with(&[private]);
            config.check_private().unwrap();
            assert_eq!(config.check(&Rules::parse([entry]).unwrap()).is_ok(), is_lifted, "{private} and {entry}");
        }
        let public = ["localhost.example", "mylocalhost", "localhost.localdomain.example", "*.localdomain.example"];
        with(&[]).check(&Rules::parse(public).unwrap()).unwrap();
    }

    #[test]
    fn what_nothing_opens_is_refused_to_operators_too() {
        for (entry, what) in [
            ("169.254.169.254", "a metadata service"),
            ("169.254.169.254:8080", "a metadata service"),
            ("169.254.170.2", "a metadata service"),
            ("[fd00:ec2::254]", "a metadata service"),
            ("100.100.100.200", "a metadata service"),
            ("192.0.0.192", "a metadata service"),
            ("168.63.129.16", "a metadata service"),
            ("[::ffff:169.254.169.254]", "a metadata service"),
            ("[64:ff9b::a9fe:a9fe]", "a metadata service"),
            ("Metadata.Google.Internal.", "a metadata service"),
            ("metadata.goog:80", "a metadata service"),
            ("169.254.1.1", "a link-local address"),
            ("[fe80::1]", "a link-local address"),
            ("0.0.0.0:80", "an unspecified address"),
            ("224.0.0.1", "a multicast address"),
        ] {
            let config = with(&["mirror.example", entry]);
            let expected = format!("{what}, which nothing opens");
            assert_eq!(config.check_private().unwrap_err().problem, expected, "{entry}");
            assert_eq!(config.check(&config.private).unwrap_err().problem, expected, "{entry}");
        }
        let error = with(&["*.app.localhost"]).check_private().unwrap_err();
        assert!(error.problem.contains("expected the very name"), "{error}");
        with(&["mirror.example", "10.0.0.1:8080", "127.0.0.1:3141", "[fd00::1]", "*.corp.example"])
            .check_private()
            .unwrap();
    }
}
