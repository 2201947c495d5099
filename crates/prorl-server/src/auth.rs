//! The bearer token.

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

/// The digest of the token that requests must carry.
#[derive(Clone)]
pub(crate) struct Token([u8; 32]);

impl Token {
    pub(crate) fn new(token: &str) -> Self {
        Self(Sha256::digest(token).into())
    }

    /// Tells whether the request carries the token. Takes as long for a nearly right one as for a wrong one: digests of
    /// equal length are compared to the last byte, and what could be learnt from their bytes says nothing of the token's.
    pub(crate) fn is_carried_by(&self, headers: &HeaderMap) -> bool {
        let given: [u8; 32] = match headers.get(header::AUTHORIZATION).and_then(|value| bearer(value.as_bytes())) {
            Some(token) => Sha256::digest(token).into(),
            None => return false,
        };
        let difference = self.0.iter().zip(given).fold(0, |acc, (ours, theirs)| acc | (ours ^ theirs));
        std::hint::black_box(difference) == 0
    }
}

/// Takes the token out of `Bearer TOKEN`; the scheme's case does not matter (RFC 9110, 11.1).
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = value.split_at_checked(b"Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| rest.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn only_the_whole_token_with_its_scheme_is_taken() {
        let token = Token::new("s3cret");
        for (value, taken) in [
            ("Bearer s3cret", true),
            ("bearer  s3cret", true),
            ("Bearer s3cre", false),
            ("Bearer s3cret1", false),
            ("Bearer ", false),
            ("Bearer", false),
            ("Basic s3cret", false),
            ("s3cret", false),
            ("", false),
        ] {
            let headers = HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static(value))]);
            assert_eq!(token.is_carried_by(&headers), taken, "{value:?}");
        }
        assert!(!token.is_carried_by(&HeaderMap::new()));
    }
}
