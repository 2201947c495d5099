//! Which hosts may be reached: a list as people write it.

use std::{fmt, str::FromStr, sync::Arc};

use super::host::{Destination, Host, shortened, split_port};

/// Entries of one list at most.
pub const MAX_RULES: usize = 256;

/// The ports of an entry that names none: those of HTTP and HTTPS.
const DEFAULT_PORTS: [u16; 2] = [80, 443];

/// How many hosts of a list a refusal names.
const SHOWN: usize = 20;

/// An entry that allows nothing which could be named.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{entry:?}: {problem}")]
pub struct RuleError {
    /// The entry, or as much of it as there is room for.
    pub entry: String,
    /// What was found and what was expected.
    pub problem: String,
}

/// One entry of a list: `host`, `host:port` or `*.domain`, see [`Rules`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pattern: Pattern,
    /// The only port, or the default ones.
    port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    Exactly(Host),
    /// Every name below this one, which itself is not meant.
    Below(Box<str>),
}

impl Rule {
    /// Tells whether it is for this destination.
    pub(super) fn allows(&self, to: &Destination) -> bool {
        let is_host = match &self.pattern {
            Pattern::Exactly(host) => *host == to.host,
            Pattern::Below(domain) => to.host.is_below(domain),
        };
        is_host && self.port.map_or_else(|| DEFAULT_PORTS.contains(&to.port), |port| port == to.port)
    }

    /// Returns the host that it is for, or the name below which it is for all.
    pub(super) fn host(&self) -> Host {
        match &self.pattern {
            Pattern::Exactly(host) => host.clone(),
            Pattern::Below(domain) => Host::Name(domain.clone()),
        }
    }

    /// Tells whether it is for all names below one.
    pub(super) fn is_wildcard(&self) -> bool {
        matches!(self.pattern, Pattern::Below(_))
    }

    /// Returns the ports that it is for.
    pub(super) fn ports(&self) -> Vec<u16> {
        self.port.map_or_else(|| DEFAULT_PORTS.to_vec(), |port| vec![port])
    }

    fn read(entry: &str) -> Result<Self, String> {
        const EXPECTED: &str = "expected a host, host:port or *.domain";
        if entry.is_empty() {
            return Err(format!("nothing; {EXPECTED}"));
        }
        if entry.contains(char::is_whitespace) {
            return Err(format!("it holds white space; {EXPECTED}"));
        }
        if entry.contains("://") {
            return Err(format!("it has a scheme; {EXPECTED}"));
        }
        if let Some((host, rest)) = entry.split_once('/') {
            let is_range = Host::parse(host).is_ok_and(|host| matches!(host, Host::Address(_)))
                || host.contains("::")
                || rest.parse::<u8>().is_ok();
            let found = if is_range { "it is a range of addresses; name each address" } else { "it has a path" };
            return Err(format!("{found}; {EXPECTED}"));
        }
        if entry.contains('@') {
            return Err(format!("it has a user; {EXPECTED}"));
        }
        let (host, port) = split_port(entry)?;
        let Some(domain) = host.strip_prefix("*.") else {
            if host == "*" {
                return Err(format!("it is every host, which no list can allow; {EXPECTED}"));
            }
            if host.contains('*') {
                return Err("a '*' stands alone, before the first dot: *.domain".to_owned());
            }
            return Ok(Self { pattern: Pattern::Exactly(Host::parse(host)?), port });
        };
        if domain.contains('*') {
            return Err("a '*' stands alone, before the first dot: *.domain".to_owned());
        }
        match Host::parse(domain)? {
            Host::Name(name) if name.contains('.') => Ok(Self { pattern: Pattern::Below(name), port }),
            Host::Name(name) => Err(format!(
                "*.{name} is everything below a top-level domain; expected two parts or more after the '*.'"
            )),
            Host::Address(_) => Err("an address has nothing below it; expected *.domain".to_owned()),
        }
    }
}

impl FromStr for Rule {
    type Err = RuleError;

    fn from_str(entry: &str) -> Result<Self, RuleError> {
        Self::read(entry).map_err(|problem| RuleError { entry: shortened(entry), problem })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.pattern {
            Pattern::Exactly(host) => host.fmt(f)?,
            Pattern::Below(domain) => write!(f, "*.{domain}")?,
        }
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// A list of what may be reached. A clone shares it.
///
/// ```
/// use prorl_sandbox::egress::Rules;
///
/// let rules = Rules::parse(["pypi.example", "*.files.example:8443", "bücher.example", "[2001:db8::1]"])?;
/// assert_eq!(rules.to_string(), "pypi.example, *.files.example:8443, xn--bcher-kva.example, [2001:db8::1]");
/// assert_eq!(
///     Rules::parse(["10.0.0.0/8"]).unwrap_err().to_string(),
///     "\"10.0.0.0/8\": it is a range of addresses; name each address; expected a host, host:port or *.domain"
/// );
/// # Ok::<(), prorl_sandbox::egress::RuleError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    entries: Arc<[Rule]>,
    /// What refusals call the list.
    name: Option<Arc<str>>,
}

impl Rules {
    /// Reads a list. An entry is `host`, for ports 80 and 443; `host:port`, for that port; or, with `*.` before it, for every
    /// name below that one and not for itself. A host is a name or an address, one of IPv6 in brackets. Names may be
    /// international; case and a dot at their end do not matter. An entry given twice is one.
    ///
    /// # Errors
    /// Names the first entry that is something else, and what was expected; or says that there are too many.
    pub fn parse<T: AsRef<str>>(entries: impl IntoIterator<Item = T>) -> Result<Self, RuleError> {
        let mut rules = Vec::new();
        for entry in entries {
            let rule: Rule = entry.as_ref().parse()?;
            if rules.contains(&rule) {
                continue;
            }
            if rules.len() == MAX_RULES {
                let problem = format!("one entry more than the {MAX_RULES} that a list may have");
                return Err(RuleError { entry: shortened(entry.as_ref()), problem });
            }
            rules.push(rule);
        }
        Ok(Self { entries: rules.into(), name: None })
    }

    /// Gives it a name, such as `network.run.allow`, by which a refusal tells which of several lists it means.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        Self { name: Some(name.into()), ..self }
    }

    /// Returns its name.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the entries.
    pub fn iter(&self) -> impl Iterator<Item = &Rule> {
        self.entries.iter()
    }

    /// Tells whether it allows nothing.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn allows(&self, to: &Destination) -> bool {
        self.entries.iter().any(|rule| rule.allows(to))
    }
}

/// The entries, as many as fit into a line that somebody is to read.
impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut before = "";
        for rule in self.entries.iter().take(SHOWN) {
            write!(f, "{before}{rule}")?;
            before = ", ";
        }
        match self.entries.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn to(authority: &str) -> Destination {
        Destination::parse(authority, None).unwrap()
    }

    #[test]
    fn entries_allow_what_they_name_and_nothing_else() {
        for (entry, allowed, refused) in [
            (
                "Example.com.",
                &["example.com:80", "EXAMPLE.com.:443"][..],
                &["example.com:8080", "a.example.com:80", "example.co:80", "xexample.com:80", "example.com.evil:80"][..],
            ),
            ("example.com:8080", &["example.com:8080"], &["example.com:80", "example.com:443"]),
            (
                "*.example.com",
                &["a.example.com:443", "a.b.example.com:80", "_x.example.com:80"],
                &["example.com:443", "aexample.com:443", "example.com.a:443", "a.example.com:8443"],
            ),
            ("*.Bücher.example:99", &["a.xn--bcher-kva.example:99"], &["xn--bcher-kva.example:99"]),
            ("192.0.2.1", &["192.0.2.1:80", "[::ffff:192.0.2.1]:80"], &["192.0.2.2:80", "[::192.0.2.1]:80"]),
            ("[2001:db8:0::1]:7", &["[2001:db8::1]:7"], &["[2001:db8::2]:7", "[2001:db8::1]:80"]),
        ] {
            let rules = Rules::parse([entry]).unwrap();
            for authority in allowed {
                assert!(rules.allows(&to(authority)), "{entry} and {authority}");
            }
            for authority in refused {
                assert!(!rules.allows(&to(authority)), "{entry} and {authority}");
            }
        }
    }

    #[test]
    fn what_is_no_entry_is_named_with_what_was_expected() {
        for (entry, problem) in [
            ("", "nothing"),
            (" example.com", "white space"),
            ("example.com\n", "white space"),
            ("https://example.com", "scheme"),
            ("example.com/simple", "path"),
            ("10.0.0.0/8", "range of addresses"),
            ("[2001:db8::]/32", "range of addresses"),
            ("2001:db8::/32", "range of addresses"),
            ("user@example.com", "user"),
            ("*", "every host"),
            ("*:443", "every host"),
            ("*.com", "two parts"),
            ("*.", "found nothing"),
            ("a*.example.com", "before the first dot"),
            ("*a.example.com", "before the first dot"),
            ("*.*.example.com", "before the first dot"),
            ("example.*", "before the first dot"),
            ("**.example.com", "before the first dot"),
            ("*.192.0.2.1", "nothing below it"),
            ("example.com:0", "expected a number from 1 to 65535"),
            ("example.com:65536", "expected a number from 1 to 65535"),
            ("example.com:*", "expected a number from 1 to 65535"),
            ("example.com:80-90", "expected a number from 1 to 65535"),
            ("::1", "in brackets"),
            ("127.1", "four decimal numbers"),
            ("0x7f000001", "four decimal numbers"),
            ("exa mple.com", "white space"),
            ("a..b", "between its dots"),
            ("example.com,example.org", "letters, digits"),
            ("xn--0.example", "no valid international name"),
        ] {
            let error = Rules::parse(["example.org", entry]).unwrap_err();
            assert_eq!(error.entry, entry);
            assert!(error.problem.contains(problem), "{error}");
            assert!(error.to_string().starts_with(&format!("{entry:?}: ")), "{error}");
        }
    }

    #[test]
    fn a_list_is_bounded_and_what_is_given_twice_is_one() {
        let twice = Rules::parse(["a.example", "A.EXAMPLE.", "a.example"]).unwrap();
        assert_eq!(twice.iter().count(), 1);
        let entries: Vec<_> = (0..=MAX_RULES).map(|n| format!("a{n}.example")).collect();
        let full = Rules::parse(&entries[..MAX_RULES]).unwrap();
        assert!(full.to_string().ends_with("a19.example and 236 more"), "{full}");
        let error = Rules::parse(&entries).unwrap_err();
        assert_eq!(error.to_string(), "\"a256.example\": one entry more than the 256 that a list may have");
        let long = Rules::parse(["a".repeat(5000)]).unwrap_err();
        assert!(long.to_string().len() < 200, "{long}");
    }

    proptest! {
        #[test]
        fn an_entry_as_it_is_shown_means_the_same(entry in "(\\*\\.)?[a-z0-9ü.-]{1,12}(:[0-9]{1,5})?") {
            if let Ok(rule) = entry.parse::<Rule>() {
                prop_assert_eq!(rule.to_string().parse::<Rule>(), Ok(rule));
            }
        }

        #[test]
        fn no_entry_allows_a_name_of_another_domain(entry in "(\\*\\.)?[a-z]{1,3}\\.[a-z]{1,3}", name in "[a-z.]{1,8}") {
            let (Ok(rule), Ok(to)) = (entry.parse::<Rule>(), Destination::parse(&name, Some(80))) else { return Ok(()) };
            let domain = entry.trim_start_matches("*.");
            if rule.allows(&to) {
                let name = to.host.to_string();
                prop_assert!(name == domain || name.ends_with(&format!(".{domain}")), "{} allows {}", entry, name);
            }
        }
    }
}
