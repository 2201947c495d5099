//! A network of a test's own, in which addresses of the documentation ranges are an internet, with servers on it.

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::{IpAddr, SocketAddr, TcpListener as StdListener},
    process::Command,
    sync::Arc,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use prorl_sandbox::egress::{Egress, EgressConfig, Gate, Place, Resolver, Rules};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
    time::timeout,
};

use crate::support::{LONG, alone, assert_passed, is_alone, is_root, skip};

/// Has `test` run in a process of its own with a network of its own; tells whether this is that process, with its network up.
pub(super) fn is_in_own_network(test: &str) -> bool {
    let ip = |args: &str| {
        let done = Command::new("ip").args(args.split(' ')).output().unwrap();
        assert!(done.status.success(), "ip {args}: {}", String::from_utf8_lossy(&done.stderr));
    };
    if is_alone(test) {
        ip("link set lo up");
        // All of these are served by this machine, and none of them is an address of its interfaces.
        ip("route add local 203.0.113.0/24 dev lo");
        ip("-6 route add local 2001:db8::/32 dev lo");
        return true;
    }
    let own_user = ["--user", "--map-current-user", "--keep-caps"];
    let wrapper = [&["unshare", "--net"][..], if is_root() { &[][..] } else { &own_user }].concat();
    let tried = |program: &str, args: &[&str]| {
        Command::new(program).args(args).output().is_ok_and(|done| done.status.success())
    };
    if !tried(wrapper[0], &[&wrapper[1..], &["ip", "link", "set", "lo", "up"]].concat()) {
        skip(test, "no network of its own can be made: ip of iproute2 and unshare are needed");
        return false;
    }
    assert_passed(&alone(test, &wrapper).output().unwrap());
    false
}

/// What names stand for. A name with several answers gives them in turn, and the last one for good.
#[derive(Debug, Default)]
pub(super) struct Names {
    answers: Mutex<HashMap<String, VecDeque<Vec<IpAddr>>>>,
    pub(super) asked: Mutex<Vec<String>>,
}

impl Names {
    /// Each entry is a name, and its answers: addresses with commas between them.
    pub(super) fn new(entries: &[(&str, &[&str])]) -> Arc<Self> {
        let addresses = |answer: &&str| answer.split(',').map(|address| address.parse().unwrap()).collect();
        let answers =
            entries.iter().map(|(name, answers)| ((*name).to_owned(), answers.iter().map(addresses).collect()));
        Arc::new(Self { answers: Mutex::new(answers.collect()), asked: Mutex::default() })
    }
}

#[async_trait]
impl Resolver for Names {
    async fn resolve(&self, name: &str, _place: &Place) -> io::Result<Vec<IpAddr>> {
        self.asked.lock().push(name.to_owned());
        let mut answers = self.answers.lock();
        let Some(answers) = answers.get_mut(name) else { return Err(io::Error::other("no such name here")) };
        Ok(if answers.len() > 1 { answers.pop_front().unwrap() } else { answers[0].clone() })
    }
}

pub(super) fn config(names: &Arc<Names>) -> EgressConfig {
    EgressConfig { resolver: Arc::clone(names) as Arc<dyn Resolver>, ..EgressConfig::default() }
}

/// A proxy at an address of this process, where no sandbox is needed to attack it.
pub(super) struct Proxy {
    pub(super) egress: Egress,
    pub(super) gate: Gate,
    pub(super) address: SocketAddr,
}

impl Proxy {
    pub(super) fn start(rules: &[&str], config: EgressConfig) -> Self {
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let gate = Gate::new(Some(Rules::parse(rules).unwrap()));
        let egress = Egress::serve(listener, gate.clone(), config).unwrap();
        Self { egress, gate, address }
    }

    pub(super) async fn talk(&self) -> Talk {
        Talk(BufReader::new(TcpStream::connect(self.address).await.unwrap()))
    }

    /// Makes one request on a connection of its own.
    pub(super) async fn ask(&self, request: &str) -> String {
        let mut talk = self.talk().await;
        talk.say(request).await;
        talk.answer().await
    }
}

/// One connection to a proxy, or to a server.
pub(super) struct Talk(pub(super) BufReader<TcpStream>);

impl Talk {
    pub(super) async fn say(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    /// Reads a head, and as much of a body as it announces.
    pub(super) async fn answer(&mut self) -> String {
        timeout(LONG, message(&mut self.0)).await.unwrap().unwrap()
    }

    /// Reads as much as a text is long, which must be that text.
    pub(super) async fn hears(&mut self, text: &str) {
        let mut heard = vec![0; text.len()];
        timeout(LONG, self.0.read_exact(&mut heard)).await.unwrap().unwrap();
        assert_eq!(String::from_utf8_lossy(&heard), text);
    }

    /// Reads until the other side ends it, orderly or not.
    pub(super) async fn rest(&mut self) -> String {
        let mut rest = Vec::new();
        let _broken = timeout(LONG, self.0.read_to_end(&mut rest)).await.unwrap();
        String::from_utf8_lossy(&rest).into_owned()
    }
}

async fn message(from: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut text = String::new();
    while !text.ends_with("\r\n\r\n") {
        if from.read_line(&mut text).await? == 0 {
            return Ok(text);
        }
    }
    if text.to_ascii_lowercase().contains("transfer-encoding: chunked\r\n") {
        while !text.ends_with("\r\n0\r\n\r\n") && from.read_line(&mut text).await? > 0 {}
        return Ok(text);
    }
    let value = |line: &str| line.to_ascii_lowercase().strip_prefix("content-length:").map(|len| len.trim().to_owned());
    let len = text.lines().find_map(value).map_or(0, |len| len.parse().unwrap());
    let mut body = vec![0; len];
    from.read_exact(&mut body).await?;
    Ok(text + &String::from_utf8_lossy(&body))
}

/// A web server that keeps what it was asked.
pub(super) struct Web {
    pub(super) seen: Arc<Mutex<Vec<String>>>,
    _tasks: JoinSet<()>,
}

impl Web {
    /// Serves at an address; `answer` makes a whole answer out of a whole request.
    pub(super) async fn start(address: &str, answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (noted, answer) = (Arc::clone(&seen), Arc::new(answer));
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (noted, answer) = (Arc::clone(&noted), Arc::clone(&answer));
                open.spawn(async move {
                    let mut stream = BufReader::new(stream);
                    while let Ok(request) = message(&mut stream).await {
                        if request.is_empty() || stream.write_all(&answer(&request)).await.is_err() {
                            return;
                        }
                        noted.lock().push(request);
                    }
                });
            }
        });
        Self { seen, _tasks: tasks }
    }

    /// Serves a text.
    pub(super) async fn saying(address: &str, text: &str) -> Self {
        let answer = ok(text.as_bytes());
        Self::start(address, move |_| answer.clone()).await
    }

    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.seen.lock())
    }
}

pub(super) fn ok(body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

/// A server that says back what it hears, and tells when a connection has ended.
pub(super) struct Echo {
    pub(super) ended: mpsc::UnboundedReceiver<()>,
    _tasks: JoinSet<()>,
}

impl Echo {
    pub(super) async fn start(address: &str) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let (tell, ended) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let tell = tell.clone();
                open.spawn(async move {
                    let (mut from, mut to) = stream.split();
                    let _broken = tokio::io::copy(&mut from, &mut to).await;
                    let _nobody = tell.send(());
                });
            }
        });
        Self { ended, _tasks: tasks }
    }

    /// Waits until a connection to it has ended.
    pub(super) async fn has_ended(&mut self) {
        timeout(LONG, self.ended.recv()).await.unwrap().unwrap();
    }
}
