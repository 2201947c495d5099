//! Addresses of backends, checked once.

use reqwest::Url;

/// A backend's address: as it was given, and the base to which paths are added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    given: String,
    base: String,
    /// Whether it was given with `/v1`, as clients of chat APIs want it.
    has_v1: bool,
}

impl Address {
    /// Checks `http://host[:port][/v1]`. The error says what is wrong and never repeats credentials.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if !text.contains("://") {
            return Err(format!("{text:?} has no scheme: expected http://HOST:PORT"));
        }
        let url = Url::parse(text).map_err(|err| format!("the address is no URL: {err}"))?;
        if !url.username().is_empty() || url.password().is_some() {
            return Err("the address holds credentials: give a key as api_key".to_owned());
        }
        match url.scheme() {
            "http" => {}
            "https" => return Err(format!("{text:?}: https is not supported yet, expected http://HOST:PORT")),
            other => return Err(format!("{text:?} has the scheme {other:?}: expected http://HOST:PORT")),
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(format!("{text:?} has a query or fragment: expected http://HOST:PORT"));
        }
        let path = url.path().trim_end_matches('/');
        if !matches!(path, "" | "/v1") {
            return Err(format!("{text:?} has the path {path:?}: expected none, or /v1"));
        }
        let host = url.host_str().ok_or_else(|| format!("{text:?} has no host"))?;
        if url.port() == Some(0) {
            return Err(format!("{text:?} has port 0"));
        }
        let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
        Ok(Self {
            given: text.trim_end_matches('/').to_owned(),
            base: format!("http://{host}{port}"),
            has_v1: path == "/v1",
        })
    }

    /// As it was given, without a slash at the end.
    pub(crate) fn as_str(&self) -> &str {
        &self.given
    }

    /// Scheme, host and port: two addresses with one base are one backend.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    pub(crate) fn has_v1(&self) -> bool {
        self.has_v1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_addresses_have_one_base() {
        for (text, base) in [
            ("http://h:8000", "http://h:8000"),
            ("http://h:8000/", "http://h:8000"),
            (" http://h:8000/v1 ", "http://h:8000"),
            ("http://h:8000/v1/", "http://h:8000"),
            ("HTTP://H:80", "http://h"),
            ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ] {
            assert_eq!(Address::parse(text).unwrap().base(), base, "{text}");
        }
        assert_eq!(Address::parse("http://h:1/v1/").unwrap().as_str(), "http://h:1/v1");
    }

    #[test]
    fn bad_addresses_say_why() {
        for (text, problem) in [
            ("h:8000", "no scheme"),
            ("", "no scheme"),
            ("http://", "no URL"),
            ("https://h:8000", "https is not supported yet"),
            ("ftp://h", "scheme \"ftp\""),
            ("http://h:8000/generate", "path \"/generate\""),
            ("http://h:8000/v1/v1", "path"),
            ("http://h:8000?x=1", "query"),
            ("http://h:99999", "no URL"),
            ("http://h:0", "port 0"),
        ] {
            let err = Address::parse(text).unwrap_err();
            assert!(err.contains(problem), "{text}: {err}");
        }
        let err = Address::parse("http://user:secret@h:8000").unwrap_err();
        assert!(err.contains("credentials") && !err.contains("secret"), "{err}");
    }
}
