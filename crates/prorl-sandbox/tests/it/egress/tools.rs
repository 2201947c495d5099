//! Programs that find the proxy by themselves.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use prorl_sandbox::{
    Bind, SandboxSpec,
    egress::{EgressConfig, Rules},
};

use super::{
    sandboxes::Let,
    support::{Names, Web, config, is_in_own_network, ok},
};
use crate::support::{skip, spec};

fn run(command: &mut Command) -> Option<String> {
    let done = command.output().ok().filter(|done| done.status.success())?;
    Some(String::from_utf8(done.stdout).unwrap().trim().to_owned())
}

/// A repository, as a web server without any knowledge of git can serve it.
fn repository(folder: &Path) -> Option<PathBuf> {
    let served = folder.join("served");
    let script = "git init -q work && cd work && echo 'of the repository' > file && git add file &&
        git -c user.name=a -c user.email=a@b.example commit -q -m first && git clone -q --bare . ../served/repo.git &&
        git -C ../served/repo.git update-server-info";
    let mut command = Command::new("sh");
    command.args(["-ec", script]).current_dir(folder).env("HOME", folder);
    fs::create_dir(&served).unwrap();
    run(&mut command).map(|_| served)
}

#[tokio::test]
async fn git_clones_what_is_allowed() {
    const ME: &str = "egress::tools::git_clones_what_is_allowed";
    let folder = tempfile::tempdir().unwrap();
    let Some(served) = repository(folder.path()) else { return skip(ME, "no git here") };
    if !is_in_own_network(ME) {
        return;
    }
    let names = Names::new(&[("code.example", &["203.0.113.1"]), ("other.example", &["203.0.113.1"])]);
    let web = Web::start("203.0.113.1:80", move |request| {
        let path = request.split([' ', '?']).nth(1).unwrap().trim_start_matches('/');
        fs::read(served.join(path))
            .map_or_else(|_| b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_vec(), |file| ok(&file))
    })
    .await;
    let inside = Let::start(spec(), &["code.example"], config(&names)).await;
    if inside.live.sh("command -v git").await.is_empty() {
        inside.shut().await;
        return skip(ME, "no git that a sandbox sees");
    }
    let cloned = inside.live.sh("git clone -q http://code.example/repo.git && cat repo/file").await;
    assert_eq!(cloned, "of the repository");
    assert!(web.take().len() > 2);
    let refused = inside.live.sh("git clone -q http://other.example/repo.git other").await;
    assert!(refused.contains("403"), "{refused}");
    assert_eq!(web.take(), [""; 0]);
    inside.shut().await;
}

/// Where pip on this machine gets packages from.
struct Index {
    /// Its URL, where it is not the one that pip knows by itself.
    url: Option<String>,
    /// The file with the certificates that it is checked by, where that is not pip's own.
    certificates: Option<PathBuf>,
}

impl Index {
    fn find() -> Self {
        let set = |variable: &str, key: &str| {
            let of_config = || run(Command::new("python3").args(["-m", "pip", "config", "get", key]));
            std::env::var(variable).ok().or_else(of_config).filter(|value| !value.is_empty())
        };
        let certificates = set("PIP_CERT", "global.cert").map(PathBuf::from).filter(|path| path.exists());
        Self { url: set("PIP_INDEX_URL", "global.index-url"), certificates }
    }
}

/// A package that is small and needs no other.
const DOWNLOAD: &str = "-m pip download --no-deps --no-cache-dir --disable-pip-version-check six -d";

#[tokio::test]
async fn pip_downloads_from_the_hosts_that_are_allowed() {
    const ME: &str = "egress::tools::pip_downloads_from_the_hosts_that_are_allowed";
    let folder = tempfile::tempdir().unwrap();
    // Elsewhere wheels may be lying about that would make the network needless.
    let mut outside = Command::new("python3");
    outside.args(DOWNLOAD.split(' ')).arg(folder.path()).env_remove("PIP_FIND_LINKS");
    if run(&mut outside).is_none() {
        return skip(ME, "pip reaches no package index from here");
    }
    let Index { url, certificates } = Index::find();
    let mut spec = SandboxSpec { tmp_bytes: 64 << 20, ..spec() };
    spec.env.extend(url.iter().map(|url| ("PIP_INDEX_URL".to_owned(), url.clone())));
    if let Some(source) = certificates {
        spec.binds.push(Bind { source, target: "/certificates.pem".into(), writable: false });
        spec.env.push(("PIP_CERT".to_owned(), "/certificates.pem".to_owned()));
    }
    let hosts = "from pip._internal.models.index import PyPI; print(PyPI.netloc, PyPI.file_storage_domain)";
    let Some(hosts) = run(Command::new("python3").args(["-c", hosts])) else { return skip(ME, "an unknown pip") };
    let mut rules: Vec<_> = hosts.split(' ').collect();
    let of_url = url.as_deref().and_then(|url| url.split("://").nth(1)?.split('/').next()?.rsplit('@').next());
    rules.extend(of_url);
    // An index of a company's own is at an address of its own.
    let config = EgressConfig { private: Rules::parse(&rules).unwrap(), ..EgressConfig::default() };
    let inside = Let::start(spec, &rules, config).await;
    if !inside.live.sh("python3 -m pip --version").await.starts_with("pip ") {
        inside.shut().await;
        return skip(ME, "no pip that a sandbox sees");
    }
    let said = inside.live.sh(&format!("python3 {DOWNLOAD} got > said && ls got || cat said")).await;
    assert!(said.starts_with("six-"), "{said}");
    inside.gate.set(Some(Rules::parse(["other.example"]).unwrap()));
    let said = inside.live.sh(&format!("python3 {DOWNLOAD} refused --retries 1 || ls refused")).await;
    // It shows the first line of the answer.
    assert!(said.contains("is not among the allowed hosts: other.example"), "{said}");
    inside.shut().await;
}
