//! What listens outside.

use std::{
    fs,
    net::TcpListener,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener},
    },
};

use prorl_sandbox::{Network, SandboxSpec};

use super::{Attack, Den, Proof, attack, outside};
use crate::support::{Live, skip};

/// A listening socket without a file, and attacks on it.
fn abstract_socket(refusals: &[&'static str]) -> (UnixListener, Vec<Attack>) {
    let name = format!("prorl-test-{}-{:p}", std::process::id(), refusals);
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let connect = format!("socket.socket(socket.AF_UNIX).connect('\\0{name}')");
    (listener, vec![attack("abstract", connect, refusals, Proof::Anybody)])
}

pub(super) async fn the_hosts_loopback_and_sockets_are_out_of_reach(den: &Den) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let folder = crate::contract::open_folder();
    let path = folder.path().join("socket");
    let _by_path = UnixListener::bind(&path).unwrap();
    let (_abstract, mut attacks) = abstract_socket(&["ECONNREFUSED"]);
    let connect = format!("socket.create_connection(('127.0.0.1', {port}), 5) and None");
    attacks.push(attack("loopback", connect, &["ECONNREFUSED"], Proof::Anybody));
    let connect = format!("socket.socket(socket.AF_UNIX).connect('{}')", path.display());
    attacks.push(attack("path", connect, &["ENOENT"], Proof::Anybody));
    // An address of documents, which nobody has.
    let connect = "socket.create_connection(('192.0.2.1', 9), 1)";
    attacks.push(attack("out", connect, &["ENETUNREACH"], Proof::Nobody));
    attacks.push(attack("links", "','.join(name for _, name in socket.if_nameindex())", &["lo"], Proof::Nobody));
    den.withstands(&attacks).await;
}

pub(super) async fn on_the_hosts_network_abstract_sockets_are_out_of_reach(den: &Den) {
    let version = format!("print(call({}, 0, 0, 1))", libc::SYS_landlock_create_ruleset);
    let has_scopes = fs::read_to_string("/sys/kernel/security/lsm").map_or_else(
        |_unknown| outside(&format!("try:\n    {version}\nexcept OSError: print(0)")).parse::<i32>().unwrap() >= 6,
        |list| list.contains("landlock") && outside(&version).parse::<i32>().unwrap() >= 6,
    );
    if !has_scopes {
        return skip(
            "on_the_hosts_network_abstract_sockets_are_out_of_reach",
            "this kernel's Landlock does not know them",
        );
    }
    let (_abstract, attacks) = abstract_socket(&["EPERM"]);
    // Its own ones work.
    let own = "
server = socket.socket(socket.AF_UNIX)
server.bind('\\0prorl-own-%d' % os.getpid())
server.listen()
forked(lambda: socket.socket(socket.AF_UNIX).connect(server.getsockname()))
print('connected')";
    for (runtime, spec) in &den.cells {
        let live = Live::start_on(&**runtime, &SandboxSpec { network: Network::Host, ..spec.clone() }).await;
        den.holds(&live, &attacks).await;
        assert_eq!(live.python(own).await, "connected");
        live.shut().await;
    }
    super::prove(&attacks);
}
