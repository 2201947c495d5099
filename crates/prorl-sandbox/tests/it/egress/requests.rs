//! What is passed on, what is refused, and what is said then.

use prorl_sandbox::egress::{EgressConfig, Rules};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::support::{Echo, Names, Proxy, Web, config, is_in_own_network, ok};

#[tokio::test]
async fn what_is_allowed_is_passed_on() {
    if !is_in_own_network("egress::requests::what_is_allowed_is_passed_on") {
        return;
    }
    let names = Names::new(&[("web.example", &["203.0.113.1"]), ("xn--bcher-kva.example", &["2001:db8::7"])]);
    let web = Web::saying("203.0.113.1:80", "hello").await;
    let v6 = Web::saying("[::]:8080", "bonjour").await;
    let _echo = Echo::start("203.0.113.1:443").await;
    let proxy = Proxy::start(&["Web.Example.", "bücher.example:8080", "[2001:db8::7]:8080"], config(&names));

    let mut talk = proxy.talk().await;
    talk.say("GET http://WEB.example/a/b?c=d HTTP/1.1\r\nHost: web.example\r\nX-Own: 1\r\n\r\n").await;
    let answer = talk.answer().await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nhello"), "{answer}");
    // The next one on the same connection, with a body.
    let body = "POST http://web.example:80?e=f HTTP/1.1\r\nHost: web.example\r\nContent-Length: 3\r\n\r\nabc";
    talk.say(body).await;
    assert!(talk.answer().await.ends_with("hello"));
    let seen = web.take();
    assert!(seen[0].starts_with("GET /a/b?c=d HTTP/1.1\r\n") && seen[0].contains("x-own: 1\r\n"), "{seen:?}");
    assert!(seen[1].starts_with("POST /?e=f HTTP/1.1\r\n") && seen[1].ends_with("\r\n\r\nabc"), "{seen:?}");

    let mut head = proxy.talk().await;
    head.say("HEAD http://web.example/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    let answer = head.rest().await;
    assert!(answer.contains("content-length: 5\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");

    for url in ["http://xn--bcher-kva.example:8080/", "http://[2001:DB8:0::7]:8080/"] {
        let answer = proxy.ask(&format!("GET {url} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert!(answer.ends_with("bonjour"), "{answer}");
    }
    assert!(v6.take()[0].contains("host: xn--bcher-kva.example:8080\r\n"));

    let mut tunnel = proxy.talk().await;
    // What comes right behind the request is for the other end.
    tunnel.say("CONNECT web.example:443 HTTP/1.1\r\nHost: web.example:443\r\n\r\nearly").await;
    let answer = tunnel.answer().await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    tunnel.hears("early").await;
    let long = "x".repeat(1 << 20);
    let (mut from, mut to) = tunnel.0.get_mut().split();
    let mut back = vec![0; long.len()];
    let (written, read) = tokio::join!(to.write_all(long.as_bytes()), from.read_exact(&mut back));
    written.unwrap();
    read.unwrap();
    assert!(back == long.as_bytes());
    proxy.egress.end().await;
}

#[tokio::test]
async fn what_is_not_allowed_is_refused_by_name() {
    if !is_in_own_network("egress::requests::what_is_not_allowed_is_refused_by_name") {
        return;
    }
    let names = Names::new(&[("web.example", &["203.0.113.1"])]);
    let web = Web::saying("203.0.113.1:80", "hello").await;
    let proxy =
        Proxy::start(&["web.example", "*.files.example", "missing.example", "closed.example:81"], config(&names));
    let list = "web.example, *.files.example, missing.example, closed.example:81";
    for (request, status, said) in [
        (
            "CONNECT other.example:443",
            "403",
            format!("egress refused: other.example:443 is not among the allowed hosts: {list}"),
        ),
        (
            "CONNECT web.example:22",
            "403",
            format!("egress refused: web.example:22 is not among the allowed hosts: {list}"),
        ),
        ("CONNECT files.example:443", "403", "files.example:443 is not among".to_owned()),
        ("CONNECT web.example.evil.example:443", "403", "web.example.evil.example:443 is not among".to_owned()),
        ("CONNECT 203.0.113.1:80", "403", "203.0.113.1:80 is not among".to_owned()),
        ("CONNECT [2001:db8::1]:443", "403", "[2001:db8::1]:443 is not among".to_owned()),
        ("CONNECT web.example", "400", "no port; expected HOST:PORT".to_owned()),
        ("CONNECT user:word@web.example:443", "400", "holds a user".to_owned()),
        ("CONNECT 0x7f.1:80", "400", "expected as four decimal numbers".to_owned()),
        ("CONNECT 2130706433:80", "400", "expected as four decimal numbers".to_owned()),
        ("CONNECT 127.1:80", "400", "expected as four decimal numbers".to_owned()),
        ("GET http://127.1/", "400", "expected as four decimal numbers".to_owned()),
        ("GET http://other.example/", "403", format!("other.example:80 is not among the allowed hosts: {list}")),
        ("GET http://web.example:8080/", "403", "web.example:8080 is not among".to_owned()),
        ("GET http://user@web.example/", "400", "holds a user".to_owned()),
        ("GET http://web.example:0/", "400", "expected a number from 1 to 65535".to_owned()),
        ("GET https://web.example/", "400", "CONNECT for all else; found https://".to_owned()),
        ("GET ftp://web.example/", "400", "found ftp://".to_owned()),
        (
            "GET http://bücher.example/",
            "400",
            "bad request: a request names its host in ASCII: expected xn--bcher-kva.example, found b\\u{fc}cher.example"
                .to_owned(),
        ),
        ("CONNECT bücher.example:443", "400", "expected xn--bcher-kva.example, found".to_owned()),
        ("TRACE http://web.example/", "400", "TRACE is not passed on".to_owned()),
        ("GET /", "400", "this is a proxy".to_owned()),
        ("OPTIONS *", "400", "this is a proxy".to_owned()),
        ("GET http://missing.example/", "502", "missing.example:80 has no address: no such name here".to_owned()),
        ("CONNECT missing.example:443", "502", "missing.example:443 has no address".to_owned()),
    ] {
        let answer = proxy.ask(&format!("{request} HTTP/1.1\r\nHost: web.example\r\n\r\n")).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(body.contains(&said), "{request}: {answer}");
        // Many programs show no more than the first line.
        assert!(head.lines().next().unwrap().len() > 40, "{answer}");
    }
    // Only what is allowed is looked up.
    assert!(names.asked.lock().iter().all(|name| name == "missing.example"), "{names:?}");
    assert_eq!(web.take(), [""; 0]);
    proxy.gate.set(None);
    let answer = proxy.ask("CONNECT web.example:443 HTTP/1.1\r\n\r\n").await;
    assert!(answer.contains("egress refused: web.example:443: no host is allowed now\n"), "{answer}");
    // Of several lists it says which one it means.
    for (rules, said) in [
        (Rules::parse(["a.example"]).unwrap().named("network.run.allow"), "hosts of network.run.allow: a.example"),
        (Rules::default().named("network.eval"), "web.example:443: no host is allowed now by network.eval"),
    ] {
        proxy.gate.set(Some(rules));
        let answer = proxy.ask("CONNECT web.example:443 HTTP/1.1\r\n\r\n").await;
        assert!(
            answer.starts_with("HTTP/1.1 403 egress refused: web.example:443") && answer.contains(said),
            "{answer}"
        );
    }
    // TLS is for what is behind the proxy.
    let mut talk = proxy.talk().await;
    talk.say("\u{16}\u{3}\u{1}\u{2}\0\u{1}\0").await;
    let answer = talk.rest().await;
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("spoken to without TLS"), "{answer}");
    proxy.egress.end().await;
}

#[tokio::test]
async fn addresses_that_are_not_the_internets_are_refused_whatever_the_name() {
    if !is_in_own_network("egress::requests::addresses_that_are_not_the_internets_are_refused_whatever_the_name") {
        return;
    }
    let own = std::process::Command::new("ip").args("addr add 198.51.100.7/32 dev lo".split(' ')).status().unwrap();
    assert!(own.success());
    let secret = Web::saying("127.0.0.1:80", "secret").await;
    let own = Web::saying("198.51.100.7:80", "secret").await;
    let names = Names::new(&[
        ("loop.example", &["127.0.0.1"]),
        ("mapped.example", &["::ffff:127.0.0.1"]),
        ("private.example", &["10.1.2.3,192.168.1.1"]),
        ("meta.example", &["169.254.169.254"]),
        ("own.example", &["198.51.100.7"]),
        ("both.example", &["127.0.0.1,203.0.113.1,10.0.0.1"]),
        ("none.example", &["0.0.0.0"]),
        ("nat64.example", &["64:ff9b::a01:203"]),
        ("6to4.example", &["2002:a01:203::1"]),
        ("teredo.example", &["2001:0:cb00:7101:0:0:f5fe:fdfc"]),
        ("link.example", &["fe80::1,169.254.7.7"]),
        // Whoever answers for them.
        ("localhost", &["203.0.113.1"]),
        ("metadata.google.internal", &["203.0.113.1"]),
    ]);
    let entries = [
        "nat64.example",
        "6to4.example",
        "teredo.example",
        "link.example",
        "metadata.google.internal",
        "loop.example",
        "mapped.example",
        "private.example",
        "meta.example",
        "own.example",
        "both.example",
        "none.example",
        "127.0.0.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "169.254.169.254",
        "[64:ff9b::7f00:1]",
        "localhost",
    ];
    let proxy = Proxy::start(&entries, config(&names));
    for (authority, said) in [
        ("loop.example", "loop.example:80 is at 127.0.0.1, a loopback address"),
        ("mapped.example", "mapped.example:80 is at 127.0.0.1, a loopback address"),
        ("private.example", "private.example:80 is at 10.1.2.3, a private address"),
        ("meta.example", "meta.example:80 is at 169.254.169.254, a metadata service"),
        ("own.example", "own.example:80 is at 198.51.100.7, this machine's own address"),
        ("none.example", "none.example:80 is at 0.0.0.0, an unspecified address"),
        ("127.0.0.1", "127.0.0.1:80 is at 127.0.0.1, a loopback address"),
        ("[::1]", "[::1]:80 is at ::1, a loopback address"),
        ("[::ffff:127.0.0.1]", "127.0.0.1:80 is at 127.0.0.1, a loopback address"),
        ("[64:ff9b::7f00:1]", "is at 64:ff9b::7f00:1, a loopback address"),
        ("169.254.169.254", "a metadata service"),
        ("nat64.example", "nat64.example:80 is at 64:ff9b::a01:203, a private address"),
        ("6to4.example", "6to4.example:80 is at 2002:a01:203::1, a private address"),
        ("teredo.example", "teredo.example:80 is at 2001:0:cb00:7101::f5fe:fdfc, a private address"),
        ("link.example", "link.example:80 is at fe80::1, a link-local address"),
        ("localhost", "localhost:80 is at 127.0.0.1, a loopback address"),
        ("metadata.google.internal", "metadata.google.internal:80 is a metadata service"),
    ] {
        for request in [format!("GET http://{authority}/"), format!("CONNECT {authority}:80")] {
            let answer = proxy.ask(&format!("{request} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
            assert!(answer.starts_with("HTTP/1.1 403 ") && answer.contains(said), "{request}: {answer}");
        }
    }
    // Of several addresses those are used that may be.
    let public = Web::saying("203.0.113.1:80", "public").await;
    let answer = proxy.ask("GET http://both.example/ HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(answer.ends_with("public"), "{answer}");
    assert_eq!([secret.take().len(), own.take().len(), public.take().len()], [0, 0, 1]);
    proxy.egress.end().await;
}

#[tokio::test]
async fn an_operator_can_lift_what_is_private() {
    if !is_in_own_network("egress::requests::an_operator_can_lift_what_is_private") {
        return;
    }
    for route in ["10.1.0.0/16", "169.254.169.254/32"] {
        let args = ["route", "add", "local", route, "dev", "lo"];
        assert!(std::process::Command::new("ip").args(args).status().unwrap().success());
    }
    let _mirror = Web::saying("10.1.0.5:80", "mirror").await;
    let _local = Web::saying("127.0.0.1:8081", "local").await;
    let _named = Web::saying("127.0.0.1:8082", "named").await;
    let _metadata = Web::saying("169.254.169.254:80", "metadata").await;
    let names = Names::new(&[
        ("mirror.example", &["10.1.0.5"]),
        ("other.example", &["10.1.0.5"]),
        ("local.example", &["127.0.0.1"]),
        ("meta.example", &["169.254.169.254"]),
    ]);
    // Those of the metadata service would be refused when a server starts.
    let private = [
        "mirror.example",
        "127.0.0.1:8081",
        "localhost:8082",
        "meta.example",
        "169.254.169.254",
        "local.example",
        "local.example:8082",
    ];
    let private = Rules::parse(private).unwrap();
    let config = EgressConfig { private, ..config(&names) };
    let rules = [
        "mirror.example",
        "other.example",
        "local.example",
        "local.example:8081",
        "local.example:8082",
        "127.0.0.1:8081",
        "127.0.0.1:8082",
        "localhost:8081",
        "localhost:8082",
        "meta.example",
    ];
    let listed = Rules::parse(["127.0.0.1:8081", "mirror.example", "203.0.113.9"]).unwrap();
    config.check(&listed).unwrap();
    for (entry, said) in [
        ("10.1.0.5", "a private address, which is refused"),
        ("127.0.0.1", "a loopback address"),
        ("169.254.169.254", "a metadata service"),
    ] {
        let error = config.check(&Rules::parse([entry]).unwrap()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{entry:?}: {said}")), "{error}");
    }
    let proxy = Proxy::start(&rules, config);
    for (url, expected) in [
        ("http://mirror.example/", "mirror"),
        ("http://127.0.0.1:8081/", "local"),
        // Its address is listed.
        ("http://local.example:8081/", "local"),
        ("http://localhost:8081/", "local"),
        ("http://localhost:8082/", "named"),
        ("http://127.0.0.1:8082/", "is at 127.0.0.1, a loopback address"),
        ("http://local.example:8082/", "is at 127.0.0.1, a loopback address"),
        ("http://local.example/", "is at 127.0.0.1, a loopback address"),
        ("http://other.example/", "is at 10.1.0.5, a private address"),
        ("http://meta.example/", "is at 169.254.169.254, a metadata service"),
    ] {
        let answer = proxy.ask(&format!("GET {url} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert!(answer.contains(expected), "{url}: {answer}");
    }
    proxy.egress.end().await;
}

#[tokio::test]
async fn a_clusters_own_proxy_knows_the_way() {
    if !is_in_own_network("egress::requests::a_clusters_own_proxy_knows_the_way") {
        return;
    }
    // The cluster's proxy is one of ours, at a private address.
    let outer_names = Names::new(&[("web.example", &["203.0.113.1"])]);
    let web = Web::start("203.0.113.1:80", |request| ok(request.lines().next().unwrap().as_bytes())).await;
    let _echo = Echo::start("203.0.113.1:443").await;
    let outer = Proxy::start(&["web.example", "203.0.113.1"], config(&outer_names));
    let names = Names::new(&[("proxy.example", &["127.0.0.1"])]);
    let upstream = format!("http://proxy.example:{}/", outer.address.port()).parse().unwrap();
    let config = EgressConfig { upstream: Some(upstream), ..config(&names) };
    let rules =
        ["web.example", "203.0.113.1", "10.0.0.1", "only-here.example", "localhost", "metadata.google.internal"];
    let proxy = Proxy::start(&rules, config);

    let answer = proxy.ask("GET http://web.example/x HTTP/1.1\r\nHost: y\r\n\r\n").await;
    assert!(answer.ends_with("GET /x HTTP/1.1"), "{answer}");
    assert!(web.take()[0].contains("host: web.example\r\n"));
    let mut tunnel = proxy.talk().await;
    tunnel.say("CONNECT web.example:443 HTTP/1.1\r\n\r\nearly").await;
    let answer = tunnel.answer().await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    tunnel.hears("early").await;
    tunnel.say("late").await;
    tunnel.hears("late").await;
    for (request, status, said) in [
        ("CONNECT other.example:443", "403", "not among the allowed hosts: web.example, 203.0.113.1"),
        ("CONNECT 10.0.0.1:443", "403", "10.0.0.1:443 is at 10.0.0.1, a private address"),
        ("CONNECT localhost:443", "403", "localhost:443 is at 127.0.0.1, a loopback address"),
        ("CONNECT metadata.google.internal:80", "403", "metadata.google.internal:80 is a metadata service"),
        ("CONNECT only-here.example:443", "502", "the proxy before it answered 403"),
    ] {
        let answer = proxy.ask(&format!("{request} HTTP/1.1\r\n\r\n")).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(said), "{answer}");
    }
    assert!(names.asked.lock().iter().all(|name| name == "proxy.example"));
    outer.egress.end().await;
    assert_eq!(tunnel.rest().await, "");
    let answer = proxy.ask("CONNECT web.example:443 HTTP/1.1\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 502 ") && answer.contains("cannot be reached"), "{answer}");
    proxy.egress.end().await;
}

/// What says to a proxy that "user:s3cret" asks.
const CREDENTIALS: &str = "proxy-authorization: Basic dXNlcjpzM2NyZXQ=\r\n";

#[tokio::test]
async fn a_clusters_own_proxy_is_told_who_asks() {
    if !is_in_own_network("egress::requests::a_clusters_own_proxy_is_told_who_asks") {
        return;
    }
    let outer = Web::start("127.0.0.1:3128", |request| {
        if request.contains(CREDENTIALS) { ok(b"") } else { b"HTTP/1.1 407 Who\r\nContent-Length: 0\r\n\r\n".to_vec() }
    })
    .await;
    let names = Names::new(&[]);
    let through = |upstream: &str| EgressConfig { upstream: Some(upstream.parse().unwrap()), ..config(&names) };
    let proxy = Proxy::start(&["web.example"], through("http://user:s3cret@127.0.0.1:3128"));
    // The sandbox's own is for nobody.
    let own = "HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Basic b3du\r\n\r\n";
    for (request, line) in [
        ("GET http://web.example/x", "GET http://web.example/x HTTP/1.1"),
        ("CONNECT web.example:443", "CONNECT web.example:443 HTTP/1.1"),
    ] {
        let answer = proxy.ask(&format!("{request} {own}")).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        let seen = outer.take().remove(0);
        assert!(seen.starts_with(line) && !seen.contains("b3du"), "{seen}");
    }
    // Another proxy could send back what it was told.
    assert!(proxy.ask(&format!("TRACE http://web.example/ {own}")).await.starts_with("HTTP/1.1 400 "));
    assert_eq!(outer.take(), [""; 0]);
    proxy.egress.end().await;
    for upstream in ["user:other@127.0.0.1:3128", "127.0.0.1:3128"] {
        let proxy = Proxy::start(&["web.example"], through(upstream));
        for request in ["GET http://web.example/", "CONNECT web.example:443"] {
            let answer = proxy.ask(&format!("{request} {own}")).await;
            assert!(
                answer.starts_with("HTTP/1.1 502 ") && answer.contains("wants another user or password"),
                "{answer}"
            );
        }
        proxy.egress.end().await;
    }
}
