//! The cluster's own proxy, which knows the way out.

use std::{fmt, str::FromStr};

use hyper::header::HeaderValue;

use super::{
    RuleError,
    host::{Destination, shortened},
};

/// An HTTP proxy that knows the way out, as `HOST:PORT` or `http://HOST:PORT`, with `USER:PASSWORD@` before the host where it
/// wants to know who asks. In those, what a URL cannot hold is written with `%`.
///
/// The password is in no text that this type or its errors print.
///
/// ```
/// use prorl_sandbox::egress::Upstream;
///
/// let upstream: Upstream = "http://rollouts:s3cret@proxy.example:3128".parse()?;
/// assert_eq!(upstream.to_string(), "proxy.example:3128");
/// # Ok::<(), prorl_sandbox::egress::RuleError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    pub(super) at: Destination,
    /// What says who asks. It is marked as sensitive, so that it is not printed.
    pub(super) credentials: Option<HeaderValue>,
}

impl FromStr for Upstream {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let bare = text.strip_prefix("http://").map_or(text, |rest| rest.strip_suffix('/').unwrap_or(rest));
        let (user, authority) = match bare.rsplit_once('@') {
            Some((user, authority)) => (Some(user), authority),
            None => (None, bare),
        };
        let refused = |problem: &str| RuleError {
            entry: shortened(authority),
            problem: format!("no HTTP proxy: {problem}; expected [http://][USER:PASSWORD@]HOST:PORT"),
        };
        if bare.contains("://") {
            // Whatever stands before an '@' stays untold.
            return Err(refused("it has a scheme other than http://"));
        }
        let at = Destination::parse(authority, None).map_err(|problem| refused(&problem))?;
        let credentials = user.map(basic).transpose().map_err(refused)?;
        Ok(Self { at, credentials })
    }
}

impl fmt::Display for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.at.fmt(f)
    }
}

/// Makes the value of a header out of `USER:PASSWORD`.
fn basic(user: &str) -> Result<HeaderValue, &'static str> {
    const UNREADABLE: &str = "a '%' in its user or password is not followed by two hexadecimal digits";
    let (name, password) = user.split_once(':').unwrap_or((user, ""));
    let name = unescaped(name).ok_or(UNREADABLE)?;
    let password = unescaped(password).ok_or(UNREADABLE)?;
    if name.is_empty() || name.contains(&b':') {
        return Err("its user is empty or holds a ':'");
    }
    let value = format!("Basic {}", base64(&[&name[..], b":", &password].concat()));
    let mut value = HeaderValue::try_from(value).map_err(|_invalid| "its user and password fit into no header")?;
    value.set_sensitive(true);
    Ok(value)
}

/// Reads what is written with `%`.
fn unescaped(text: &str) -> Option<Vec<u8>> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        let is_plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        bytes.push(u8::from_str_radix(digits, 16).ok().filter(|_| is_plain)?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    Some(bytes)
}

/// Writes bytes as RFC 4648 has it.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = (0..3).fold(0, |bits, idx| bits << 8 | usize::from(group.get(idx).copied().unwrap_or(0)));
        for (idx, shift) in [18, 12, 6, 0].into_iter().enumerate() {
            text.push(if idx <= group.len() { char::from(DIGITS[bits >> shift & 63]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_as_the_standard_has_them() {
        for (bytes, text) in [
            (&b""[..], ""),
            (b"f", "Zg=="),
            (b"fo", "Zm8="),
            (b"foo", "Zm9v"),
            (b"foobar", "Zm9vYmFy"),
            (b"\xfb\xff\xbf", "+/+/"),
        ] {
            assert_eq!(base64(bytes), text);
        }
    }

    #[test]
    fn a_proxy_may_want_to_know_who_asks() {
        for (text, at, credentials) in [
            ("proxy.example:3128", "proxy.example:3128", None),
            ("http://Proxy.Example:3128/", "proxy.example:3128", None),
            ("http://Aladdin:open%20sesame@p.example:1", "p.example:1", Some("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==")),
            // A password may hold what ends it elsewhere.
            ("a:b@c:d@[::1]:80", "[::1]:80", Some("Basic YTpiQGM6ZA==")),
            ("a@p.example:1", "p.example:1", Some("Basic YTo=")),
            ("%c3%a9:%40@p.example:1", "p.example:1", Some("Basic w6k6QA==")),
        ] {
            let upstream: Upstream = text.parse().unwrap();
            assert_eq!(upstream.to_string(), at, "{text}");
            assert_eq!(upstream.credentials.as_ref().map(|value| value.to_str().unwrap()), credentials, "{text}");
        }
    }

    #[test]
    fn no_text_tells_a_password() {
        let upstream: Upstream = "http://user:s3cret@proxy.example:3128".parse().unwrap();
        for shown in [upstream.to_string(), format!("{upstream:?}"), format!("{:#?}", Some(upstream))] {
            assert!(!shown.contains("s3cret") && !shown.contains(&base64(b"user:s3cret")), "{shown}");
        }
        for (text, problem) in [
            ("user:s3cret@proxy.example", "it has no port"),
            ("https://user:s3cret@proxy.example:3128", "a scheme other than http://"),
            ("user:s3cret%2@proxy.example:1", "two hexadecimal digits"),
            ("user:s3cret%+2@proxy.example:1", "two hexadecimal digits"),
            (":s3cret@proxy.example:1", "its user is empty"),
            ("a%3ab:s3cret@proxy.example:1", "holds a ':'"),
            ("user:s3cret@", "it has no port"),
            ("user:s3cret@proxy.example:1/path", "expected a number"),
        ] {
            let error = text.parse::<Upstream>().unwrap_err();
            assert!(error.problem.contains(problem), "{text}: {error}");
            assert!(!format!("{error} {error:?}").contains("s3cret"), "{error}");
        }
    }
}
