//! Ways around the list: other names for a host, other hosts in a request, requests within requests.

use super::support::{Echo, Names, Proxy, Web, config, is_in_own_network, ok};

#[tokio::test]
async fn a_name_that_changes_its_mind_changes_nothing() {
    if !is_in_own_network("egress::attacks::a_name_that_changes_its_mind_changes_nothing") {
        return;
    }
    let names = Names::new(&[
        ("first.example", &["203.0.113.1", "127.0.0.1"]),
        ("later.example", &["127.0.0.1", "203.0.113.1"]),
    ]);
    let secret = Web::saying("127.0.0.1:80", "secret").await;
    let _public = Web::saying("203.0.113.1:80", "public").await;
    let proxy = Proxy::start(&["first.example", "later.example"], config(&names));
    let mut talk = proxy.talk().await;
    talk.say("GET http://first.example/ HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(talk.answer().await.ends_with("public"));
    assert_eq!(*names.asked.lock(), ["first.example"], "asked once, and connected to that answer");
    // On the same connection: it is looked at again.
    talk.say("GET http://first.example/ HTTP/1.1\r\nHost: x\r\n\r\n").await;
    let answer = talk.answer().await;
    assert!(answer.starts_with("HTTP/1.1 403 ") && answer.contains("a loopback address"), "{answer}");
    let answer = proxy.ask("CONNECT later.example:80 HTTP/1.1\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
    assert_eq!(secret.take(), [""; 0]);
    proxy.egress.end().await;
}

#[tokio::test]
async fn the_url_says_the_host_and_headers_do_not() {
    if !is_in_own_network("egress::attacks::the_url_says_the_host_and_headers_do_not") {
        return;
    }
    let names = Names::new(&[("web.example", &["203.0.113.1"]), ("other.example", &["203.0.113.2"])]);
    let web = Web::saying("203.0.113.1:80", "web").await;
    let other = Web::saying("203.0.113.2:80", "other").await;
    let proxy = Proxy::start(&["web.example"], config(&names));
    let headers = "Host: other.example\r\nHost: third.example\r\nProxy-Authorization: Basic c2VjcmV0\r\n\
                   Proxy-Connection: keep-alive\r\nKeep-Alive: 5\r\nTE: trailers\r\nUpgrade: websocket\r\n\
                   Connection: keep-alive, X-Hop, Host, Upgrade\r\nX-Hop: 1\r\nX-Stays: 1\r\nAuthorization: Bearer own\r\n";
    let mut talk = proxy.talk().await;
    talk.say(&format!("GET http://web.example/ HTTP/1.1\r\n{headers}\r\n")).await;
    let answer = talk.answer().await;
    assert!(answer.ends_with("web"), "{answer}");
    let seen = web.take();
    let mut lines: Vec<_> = seen[0].trim_end().lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["GET / HTTP/1.1", "authorization: Bearer own", "host: web.example", "x-stays: 1"]);
    // A later request on the connection is held against the list as the first was.
    talk.say("GET http://other.example/ HTTP/1.1\r\nHost: web.example\r\n\r\n").await;
    assert!(talk.answer().await.starts_with("HTTP/1.1 403 "));
    assert_eq!(other.take(), [""; 0]);
    // So are those that were sent before the first was answered.
    let mut talk = proxy.talk().await;
    let get = |host: &str| format!("GET http://{host}/ HTTP/1.1\r\nHost: web.example\r\n\r\n");
    talk.say(&[get("web.example"), get("other.example"), get("web.example"), get("127.0.0.1")].concat()).await;
    for status in [200, 403, 200, 403] {
        let answer = talk.answer().await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    }
    assert_eq!((web.take().len(), other.take().len()), (2, 0));
    // A connection that becomes a tunnel is one to its first host for good.
    talk.say(&[&get("web.example"), "CONNECT web.example:80 HTTP/1.1\r\n\r\n", &get("other.example")].concat()).await;
    for _ in 0..2 {
        assert!(talk.answer().await.starts_with("HTTP/1.1 200 "));
    }
    assert!(talk.answer().await.ends_with("web"));
    assert_eq!(other.take(), [""; 0]);
    proxy.egress.end().await;
}

#[tokio::test]
async fn requests_within_requests_reach_nobody() {
    if !is_in_own_network("egress::attacks::requests_within_requests_reach_nobody") {
        return;
    }
    let names = Names::new(&[("web.example", &["203.0.113.1"])]);
    let web = Web::saying("203.0.113.1:80", "web").await;
    let proxy = Proxy::start(&["web.example"], config(&names));
    let hidden = "GET http://web.example/hidden HTTP/1.1\r\nHost: web.example\r\n\r\n";
    let post = "POST http://web.example/ HTTP/1.1\r\nHost: web.example\r\n";
    // Two readings of where a message ends are none.
    for lengths in [
        format!("Content-Length: 4\r\nContent-Length: {}\r\n", hidden.len()),
        "Content-Length: +4\r\n".to_owned(),
        "Content-Length: 0x4\r\n".to_owned(),
        "Content-Length: -1\r\n".to_owned(),
        "Transfer-Encoding: xchunked\r\n".to_owned(),
        "Transfer-Encoding: chunked, identity\r\n".to_owned(),
        "Content-Length : 4\r\n".to_owned(),
        "Content-Length: 4\r\n folded\r\n".to_owned(),
    ] {
        let mut talk = proxy.talk().await;
        talk.say(&format!("{post}{lengths}\r\n{hidden}")).await;
        let answer = talk.rest().await;
        assert!(answer.starts_with("HTTP/1.1 400 ") && answer.matches("HTTP/1.1 ").count() == 1, "{lengths}: {answer}");
    }
    assert_eq!(web.take(), [""; 0]);
    // With both, chunks count; what goes out says one thing only.
    let mut talk = proxy.talk().await;
    talk.say(&format!(
        "{post}Content-Length: 4\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    ))
    .await;
    let _refused_or_answered = talk.rest().await;
    for request in web.take() {
        let lower = request.to_ascii_lowercase();
        assert_ne!(lower.contains("content-length"), lower.contains("transfer-encoding"), "{request}");
    }
    for request in [
        "CONNECT web.example:80 HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        "CONNECT web.example:80 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ] {
        let answer = proxy.ask(request).await;
        assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("CONNECT has no body"), "{answer}");
    }
    // Requests that are none.
    for request in [
        "GET http://web.example/ HTTP/1.1\r\nHost: x\r\nNo colon\r\n\r\n",
        "GET http://web.example/\0 HTTP/1.1\r\n\r\n",
        "GET http://web.example/ a HTTP/1.1\r\n\r\n",
        "GET http://b\u{fc}cher.example/ HTTP/1.1\r\n\r\n",
        "CONNECT http://web.example:80/ HTTP/1.1\r\n\r\n",
        "CONNECT /x HTTP/1.1\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\u{1}\u{fc}\u{3}\u{3}\r\n\r\n",
    ] {
        let mut talk = proxy.talk().await;
        talk.say(request).await;
        // Some of them leave a connection on which another request could follow.
        tokio::io::AsyncWriteExt::shutdown(talk.0.get_mut()).await.unwrap();
        let answer = talk.rest().await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400 "), "{request:?}: {answer}");
    }
    assert_eq!(web.take(), [""; 0]);
    proxy.egress.end().await;
}

#[tokio::test]
async fn what_a_server_answers_is_not_followed() {
    if !is_in_own_network("egress::attacks::what_a_server_answers_is_not_followed") {
        return;
    }
    let names = Names::new(&[("web.example", &["203.0.113.1"])]);
    let _web = Web::start("203.0.113.1:80", |request| match request.split(' ').nth(1).unwrap() {
        "/moved" => b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n".to_vec(),
        "/switch" => b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n".to_vec(),
        "/garbage" => b"hello\r\n\r\n".to_vec(),
        "/large" => format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(1 << 20)).into_bytes(),
        "/hop" => b"HTTP/1.1 200 OK\r\nConnection: X-Hop\r\nX-Hop: 1\r\nProxy-Authenticate: Basic\r\nContent-Length: 2\r\n\r\nok".to_vec(),
        "/chunked" => b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n".to_vec(),
        _ => ok(b"web"),
    })
    .await;
    let secret = Web::saying("127.0.0.1:80", "secret").await;
    let proxy = Proxy::start(&["web.example"], config(&names));
    for (path, status, said) in [
        ("moved", "302", "location: http://127.0.0.1/"),
        ("switch", "502", "changed the protocol, which nobody asked for"),
        ("garbage", "502", "web.example:80 cannot be reached: invalid HTTP version parsed"),
        ("large", "502", "message head is too large"),
        ("hop", "200", "\r\n\r\nok"),
        ("chunked", "200", "\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"),
    ] {
        let answer = proxy.ask(&format!("GET http://web.example/{path} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(said), "{path}: {answer}");
        assert!(!answer.contains("x-hop") && !answer.contains("proxy-authenticate"), "{answer}");
    }
    assert_eq!(secret.take(), [""; 0]);
    drop(proxy);
}

#[tokio::test]
async fn a_tunnel_ends_with_the_list_that_allowed_it() {
    if !is_in_own_network("egress::attacks::a_tunnel_ends_with_the_list_that_allowed_it") {
        return;
    }
    let names = Names::new(&[("a.example", &["203.0.113.1"]), ("b.example", &["203.0.113.2"])]);
    let mut echoes = [Echo::start("203.0.113.1:443").await, Echo::start("203.0.113.2:443").await];
    // It announces more than it sends.
    let _web = Web::start("203.0.113.1:80", |_| b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf".to_vec()).await;
    let proxy = Proxy::start(&["a.example", "b.example"], config(&names));
    let open = async |name: &str| {
        let mut tunnel = proxy.talk().await;
        tunnel.say(&format!("CONNECT {name}:443 HTTP/1.1\r\n\r\nhello")).await;
        assert!(tunnel.answer().await.starts_with("HTTP/1.1 200 "));
        tunnel.hears("hello").await;
        tunnel
    };
    let [mut a, mut b] = [open("a.example").await, open("b.example").await];
    let mut half = proxy.talk().await;
    half.say("GET http://a.example/ HTTP/1.1\r\nHost: x\r\n\r\n").await;
    half.hears("HTTP/1.1 200 OK\r\n").await;
    let mut idle = proxy.talk().await;
    idle.say("GET http://c.example/ HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(idle.answer().await.starts_with("HTTP/1.1 403 "));

    proxy.gate.set(Some(prorl_sandbox::egress::Rules::parse(["b.example"]).unwrap()));
    assert_eq!(a.rest().await, "");
    echoes[0].has_ended().await;
    assert!(half.rest().await.ends_with("half"));
    // The others go on.
    b.say("still").await;
    b.hears("still").await;
    idle.say("GET http://a.example/ HTTP/1.1\r\nHost: x\r\n\r\n").await;
    let answer = idle.answer().await;
    assert!(answer.contains("a.example:80 is not among the allowed hosts: b.example"), "{answer}");
    // Nothing outlives the proxy.
    drop(proxy);
    assert_eq!((b.rest().await, idle.rest().await), (String::new(), String::new()));
    echoes[1].has_ended().await;
}
