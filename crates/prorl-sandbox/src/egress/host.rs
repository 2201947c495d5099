//! What a request or a rule names: a host and a port, in one spelling.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use idna::{AsciiDenyList, domain_to_ascii_cow};

/// Longest name that the domain name system can hold, in bytes, and the longest part of one.
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// What the names and addresses are by which a cloud tells a machine its secrets.
pub(super) const METADATA: &str = "a metadata service";

/// Names by which clouds' own name servers, and those of the proxies in them, give out the addresses of such services.
const METADATA_NAMES: [&str; 7] = [
    "instance-data",
    "instance-data.ec2.internal",
    "metadata",
    "metadata.goog",
    "metadata.google.internal",
    "metadata.platformequinix.com",
    "metadata.tencentyun.com",
];

/// Names that stand for this machine alone wherever they are asked for (RFC 6761 and what `/etc/hosts` usually holds), as do all
/// names below the first.
const LOOPBACK_NAMES: [&str; 8] = [
    "localhost",
    "localhost.localdomain",
    "localhost4",
    "localhost4.localdomain4",
    "localhost6",
    "localhost6.localdomain6",
    "ip6-localhost",
    "ip6-loopback",
];

/// A name or an address, in the one spelling that is compared: a name in lower case, in its ASCII form and without the dot at
/// its end; an IPv4 address as such, however it was wrapped.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Host {
    Name(Box<str>),
    Address(IpAddr),
}

impl Host {
    /// Reads a host as it stands in an authority: an IPv6 address is in brackets.
    ///
    /// # Errors
    /// Says what is there instead, and what was expected.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if let Some(inner) = text.strip_prefix('[') {
            let address = inner.strip_suffix(']').and_then(|inner| inner.parse::<Ipv6Addr>().ok());
            let address = address.ok_or("expected an IPv6 address between brackets, without a zone")?;
            return Ok(Self::Address(IpAddr::V6(address).to_canonical()));
        }
        if text.is_empty() {
            return Err("expected a host, found nothing".to_owned());
        }
        // A name of the longest kind in letters that ASCII has to spell out is a few times shorter than this.
        if text.len() > MAX_NAME * 4 {
            return Err(format!("{} bytes are too long for a host", text.len()));
        }
        let ascii = domain_to_ascii_cow(text.as_bytes(), AsciiDenyList::URL)
            .map_err(|_unnameable| "it holds what no host name can hold, or is no valid international name")?;
        let name = ascii.strip_suffix('.').unwrap_or(&ascii);
        let last = name.rsplit('.').next().unwrap_or_default();
        if is_number(last) {
            // Programs disagree on what `127.1`, `0177.0.0.1` and `2130706433` are; most take them for addresses.
            let address = name.parse::<Ipv4Addr>();
            let why = "a host whose last part is a number is an address, expected as four decimal numbers";
            return Ok(Self::Address(address.map_err(|_odd| why)?.into()));
        }
        check_name(name)?;
        Ok(Self::Name(name.into()))
    }

    /// Tells whether it is a name somewhere below `domain`, which is a name in the same spelling.
    pub(super) fn is_below(&self, domain: &str) -> bool {
        match self {
            Self::Name(name) => name.strip_suffix(domain).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.')),
            Self::Address(_) => false,
        }
    }

    /// Tells whether it is a name that can only be this machine's.
    pub(super) fn is_loopback(&self) -> bool {
        match self {
            Self::Name(name) => LOOPBACK_NAMES.contains(&&**name) || self.is_below(LOOPBACK_NAMES[0]),
            Self::Address(_) => false,
        }
    }

    /// Tells whether it is a name that is known for a metadata service.
    pub(super) fn is_metadata(&self) -> bool {
        matches!(self, Self::Name(name) if METADATA_NAMES.contains(&&**name))
    }

    /// Returns the addresses that it means whoever is asked; nothing for a name that others answer for.
    pub(super) fn known_addresses(&self) -> Option<Vec<IpAddr>> {
        match self {
            Self::Address(address) => Some(vec![*address]),
            Self::Name(_) if self.is_loopback() => Some(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]),
            Self::Name(_) => None,
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(IpAddr::V4(address)) => address.fmt(f),
            Self::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
        }
    }
}

/// Tells whether the C library would read it as a number: decimal, octal or hexadecimal.
fn is_number(label: &str) -> bool {
    let digits = label.bytes().all(|byte| byte.is_ascii_digit()) && !label.is_empty();
    let hexadecimal = label.strip_prefix("0x").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()));
    digits || hexadecimal
}

fn check_name(name: &str) -> Result<(), String> {
    if name.len() > MAX_NAME {
        return Err(format!("{} bytes are more than the {MAX_NAME} of the longest name", name.len()));
    }
    for label in name.split('.') {
        if label.is_empty() || label.len() > MAX_LABEL {
            return Err(format!("a part of {} bytes between its dots; expected 1 to {MAX_LABEL}", label.len()));
        }
        // Names of machines have no `_`, but some registries inside companies do.
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_');
        if !label.bytes().all(plain) || label.starts_with('-') {
            return Err("expected letters, digits, '-' and '.' only".to_owned());
        }
    }
    Ok(())
}

/// Takes the port off an authority. Nothing where it names none.
///
/// # Errors
/// Says what is there instead of a port.
pub(super) fn split_port(authority: &str) -> Result<(&str, Option<u16>), String> {
    // The colons within brackets are the address's own.
    let after = authority.rfind(']').map_or(0, |bracket| bracket + 1);
    let Some(colon) = authority[after..].find(':').map(|colon| after + colon) else { return Ok((authority, None)) };
    let (host, port) = (&authority[..colon], &authority[colon + 1..]);
    if port.contains(':') {
        return Err("it has several colons; expected an IPv6 address in brackets".to_owned());
    }
    let is_plain = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    match port.parse() {
        Ok(port) if is_plain && port > 0 => Ok((host, Some(port))),
        _ => Err(format!("port {:?}; expected a number from 1 to 65535", shortened(port))),
    }
}

/// Returns as much of a text as an error needs to show.
pub(super) fn shortened(text: &str) -> String {
    const SHOWN: usize = 80;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// Where a connection is to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) host: Host,
    pub(super) port: u16,
}

impl Destination {
    pub(super) fn at(address: IpAddr, port: u16) -> Self {
        Self { host: Host::Address(address), port }
    }

    /// Reads an authority.
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub(super) fn parse(authority: &str, default_port: Option<u16>) -> Result<Self, String> {
        if authority.contains('@') {
            return Err("it holds a user, which is not passed on; expected HOST:PORT".to_owned());
        }
        let (host, port) = split_port(authority)?;
        let port = port.or(default_port).ok_or("it has no port; expected HOST:PORT")?;
        Ok(Self { host: Host::parse(host)?, port })
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spelled(text: &str) -> String {
        Host::parse(text).map_or_else(|problem| format!("error: {problem}"), |host| host.to_string())
    }

    #[test]
    fn a_host_has_one_spelling() {
        for (text, expected) in [
            ("Example.COM.", "example.com"),
            ("bücher.example", "xn--bcher-kva.example"),
            ("BÜCHER。example", "xn--bcher-kva.example"),
            ("xn--bcher-kva.example", "xn--bcher-kva.example"),
            ("my_registry", "my_registry"),
            ("ｅｘａｍｐｌｅ.com", "example.com"),
            ("１２７.0.0.1", "127.0.0.1"),
            ("192.0.2.7", "192.0.2.7"),
            ("192.0.2.7.", "192.0.2.7"),
            ("[2001:DB8::1]", "[2001:db8::1]"),
            ("[::ffff:10.0.0.1]", "10.0.0.1"),
            ("a0x7f.example", "a0x7f.example"),
        ] {
            assert_eq!(spelled(text), expected, "{text}");
        }
    }

    #[test]
    fn numbers_that_are_no_plain_address_are_no_names_either() {
        for text in [
            "127.1",
            "2130706433",
            "0x7f.1",
            "0x7f000001",
            "0177.0.0.1",
            "127.0.0.01",
            "1.2.3.4.5",
            "256.0.0.1",
            "0x",
            "example.0x1",
            "127.0.0.0x1",
            "example.1",
            "0X7F.0.0.1",
            "١٢٧.0.0.1",
            "127.0.0.①",
            "1.2.3",
        ] {
            assert!(!matches!(Host::parse(text), Ok(Host::Name(_))), "{text}: {}", spelled(text));
        }
        assert!(spelled("127.1").contains("expected as four decimal numbers"));
    }

    #[test]
    fn what_is_no_host_is_said() {
        let long = format!("{}.example", "a".repeat(64));
        for text in [
            "",
            ".",
            "a..b",
            ".a",
            "a b",
            "a\tb",
            "a\0b",
            "a/b",
            "a@b",
            "a%41",
            "a:1",
            "*.a",
            "[::1",
            "[fe80::1%eth0]",
            "[127.0.0.1]",
            "::1",
            "-a.b",
            "xn--0.example",
            "a\r\nb",
            "a!b",
            "a,b",
            "\u{ad}",
            &long,
            &"a.".repeat(200),
        ] {
            assert!(Host::parse(text).is_err(), "{text:?}: {}", spelled(text));
        }
    }

    #[test]
    fn ports_are_plain_numbers() {
        assert_eq!(split_port("a"), Ok(("a", None)));
        assert_eq!(split_port("[::1]:8"), Ok(("[::1]", Some(8))));
        for text in ["a:", "a:0", "a:65536", "a:+80", "a:80x", "a: 80", "a:-1", "::1", "a:80:80", "[::1]:", "a:８０"]
        {
            assert!(split_port(text).is_err(), "{text}");
        }
        assert!(Destination::parse("u:p@example.com:80", None).is_err());
        assert!(Destination::parse("example.com", None).is_err());
        assert_eq!(Destination::parse("Example.com", Some(80)).unwrap().to_string(), "example.com:80");
    }

    proptest! {
        #[test]
        fn a_spelling_is_its_own(text in "\\PC{0,40}") {
            if let Ok(host) = Host::parse(&text) {
                prop_assert_eq!(Host::parse(&host.to_string()), Ok(host));
            }
        }

        #[test]
        fn no_name_is_an_address_to_the_c_library(parts in prop::collection::vec("(0x)?[0-9a-f]{0,4}", 1..5)) {
            // As `inet_aton` has it: at most four numbers, each decimal, octal or hexadecimal.
            let is_numeric = |part: &str| match part.strip_prefix("0x") {
                Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
                None => !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()),
            };
            if let Ok(Host::Name(name)) = Host::parse(&parts.join(".")) {
                prop_assert!(!name.split('.').all(is_numeric), "{}", name);
            }
        }
    }
}
