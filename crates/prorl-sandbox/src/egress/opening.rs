//! The first bytes of a connection, which are looked at before they are read as a request.
//!
//! The parser of requests answers what it cannot read with a bare 400. Two kinds of that are worth a word, since a person
//! wrote a setting that made them: a host that is not in ASCII, and TLS to this side.

use std::time::Duration;

use tokio::{
    io::{AsyncWriteExt as _, copy, sink},
    net::TcpStream,
    time::timeout,
};

use super::{
    host::{Host, shortened, split_port},
    refusal::Refusal,
};

/// Bytes that are looked at. A method and a host fit.
const LOOKED_AT: usize = 2048;

/// How long the other side has to hear why, before the connection ends.
const LINGER: Duration = Duration::from_secs(1);

/// What every TLS connection begins with: the kind of record and the higher part of its version.
const TLS: [u8; 2] = [22, 3];

/// Waits for the first bytes of a connection, and leaves them there.
///
/// # Errors
/// Says what is wrong with them.
pub(super) async fn look_at(client: &TcpStream) -> Result<(), Refusal> {
    let mut first = [0; LOOKED_AT];
    // A broken connection tells whoever reads it.
    let n_bytes = client.peek(&mut first).await.unwrap_or(0);
    check(&first[..n_bytes]).map_err(Refusal::Malformed)
}

/// Says why, and ends the connection.
pub(super) async fn refuse(mut client: TcpStream, refusal: &Refusal) {
    let said = async {
        client.write_all(&refusal.bytes()).await?;
        client.shutdown().await?;
        // What was not read when a connection ends takes the answer along.
        copy(&mut client, &mut sink()).await
    };
    let _gone = timeout(LINGER, said).await;
}

fn check(first: &[u8]) -> Result<(), String> {
    if first.starts_with(&TLS) {
        return Err(
            "this proxy is spoken to without TLS: its URL begins with http://, also for https:// hosts".to_owned()
        );
    }
    let line = first.split(|byte| matches!(byte, b'\r' | b'\n')).next().unwrap_or_default();
    let target = line.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
    let rest = target.windows(3).position(|three| three == b"://").map_or(target, |at| &target[at + 3..]);
    let authority = rest.split(|byte| matches!(byte, b'/' | b'?')).next().unwrap_or_default();
    if authority.is_ascii() {
        return Ok(());
    }
    let authority = String::from_utf8_lossy(authority);
    let host = split_port(&authority).map_or(&*authority, |(host, _port)| host);
    let found = shortened(host).escape_default().to_string();
    Err(match Host::parse(host) {
        Ok(host) => format!("a request names its host in ASCII: expected {host}, found {found}"),
        Err(_unnameable) => format!("a request names its host in ASCII, found {found}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_in_ascii_and_paths_need_not_be() {
        for (first, said) in [
            ("GET http://bücher.example/ HTTP/1.1\r\n", "expected xn--bcher-kva.example, found b\\u{fc}cher.example"),
            ("CONNECT bücher.example:443 HTTP/1.1\r\n", "expected xn--bcher-kva.example, found b\\u{fc}cher.example"),
            ("GET http://a.example:８０/ HTTP/1.1", "names its host in ASCII, found a.example:\\u{ff18}\\u{ff10}"),
            ("GET http://b\u{fffd}cher.example", "names its host in ASCII, found b\\u{fffd}cher.example"),
        ] {
            let problem = check(first.as_bytes()).unwrap_err();
            assert!(problem.ends_with(said), "{problem}");
        }
        let latin = check(b"GET http://b\xfccher.example/ HTTP/1.1\r\n").unwrap_err();
        assert!(latin.ends_with("found b\\u{fffd}cher.example"), "{latin}");
        assert!(check(&[22, 3, 1, 2, 0, 1]).unwrap_err().contains("without TLS"));
        for fine in
            ["", "GET", "GET ", "GET http://a.example/ü HTTP/1.1", "GET /ü", "GET http://a.example?ü\r\nX: ü", "\u{fc}"]
        {
            check(fine.as_bytes()).unwrap();
        }
    }
}
