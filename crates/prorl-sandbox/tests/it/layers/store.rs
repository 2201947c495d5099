//! Stores that take no layer, and hosts that die while they make one.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use prorl_core::FailureClass;
use prorl_sandbox::{
    FreezeError, SandboxSpec,
    store::{ImageStore, StoreConfig},
};
use tokio::time::timeout;

use super::Field;
use crate::{
    contract::open_folder,
    support::{
        LONG, Live, adopt_orphans, alone, assert_all_end, assert_no_children, assert_passed, is_alone, is_root, skip,
        spec,
    },
};

/// Files below a folder.
fn files(folder: &Path) -> Vec<String> {
    let listed = Command::new("find").arg(folder).args(["!", "-type", "d", "-path", "*/root/*"]).output().unwrap();
    String::from_utf8(listed.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn a_store_that_takes_nothing_leaves_the_sandbox_alone() {
    let field = Field::host("layers::store::a_store_that_takes_nothing_leaves_the_sandbox_alone").unwrap();
    let live = field.start(&[]).await;
    live.sh("echo x > kept").await;
    let (dir, away) = (field.store.dir().to_owned(), field.store.dir().with_extension("away"));
    fs::rename(&dir, &away).unwrap();
    fs::write(&dir, "no folder").unwrap();
    let error = live.sandbox.freeze(&field.store).await.unwrap_err();
    let FreezeError::Store(error) = &error else { panic!("{error:?}") };
    assert!(error.to_string().contains(&*dir.to_string_lossy()), "{error}");
    fs::remove_file(&dir).unwrap();
    fs::rename(&away, &dir).unwrap();
    assert_eq!(live.sh("cat kept").await, "x");
    let layer = field.freeze(&live).await;
    assert_eq!(fs::read_to_string(layer.root().join("workspace/kept")).unwrap(), "x\n");
}

#[tokio::test]
async fn what_a_store_cannot_keep_is_named() {
    const ME: &str = "layers::store::what_a_store_cannot_keep_is_named";
    if !is_root() {
        return skip(ME, "only root mounts file systems of its own for the store");
    }
    if !is_alone(ME) {
        let folder = open_folder();
        let mount =
            "mount -t tmpfs -o size=4M,mode=755 none $PLACE && cd $PLACE && mkdir -m 755 full up work low over &&
            mount -t overlay -o lowerdir=low,upperdir=up,workdir=work none over && exec \"$@\"";
        let wrapper = ["unshare", "--mount", "sh", "-c", mount, "sh"];
        return assert_passed(&alone(ME, &wrapper).env("PLACE", folder.path()).output().unwrap());
    }
    let place = std::env::var_os("PLACE").unwrap();
    let place = Path::new(&place);
    let field = Field::on(crate::contract::Ground::namespace(ME)).unwrap();

    let store = ImageStore::open(StoreConfig::new(place.join("full"))).unwrap();
    let live = field.start(&[]).await;
    live.sh("echo small > small; head -c 8M /dev/urandom > large").await;
    let error = live.sandbox.freeze(&store).await.unwrap_err();
    assert_eq!(error.failure_class(), FailureClass::Resource);
    let FreezeError::Copy { target, source, .. } = &error else { panic!("{error:?}") };
    assert_eq!((target.as_str(), source.raw_os_error()), ("/workspace/large", Some(libc::ENOSPC)));
    assert!(error.to_string().contains(&*place.join("full").to_string_lossy()), "{error}");
    assert_eq!(files(store.dir()), Vec::<String>::new());
    timeout(LONG, live.sandbox.wait_dead()).await.unwrap();
    let live = field.start(&[]).await;
    live.sh("echo small > small").await;
    let layer = live.sandbox.freeze(&store).await.unwrap();
    assert!(layer.root().join("workspace/small").exists());

    let store = ImageStore::open(StoreConfig::new(place.join("over"))).unwrap();
    let live = field.start(&[]).await;
    live.sh("echo kept > kept; rm /var/missing").await;
    let text = live.sandbox.freeze(&store).await.unwrap_err().to_string();
    assert!(text.contains("(a device of number 0) that there is no /var/missing in the store"), "{text}");
    assert_eq!(files(store.dir()), Vec::<String>::new());
}

/// A sandbox whose layer takes a while to copy.
async fn busy() -> Live {
    let spec = SandboxSpec { freezable: true, start_timeout: LONG, ..spec() };
    let live = Live::start(&spec).await;
    let script = "i=0; while [ $i -lt 3000 ]; do echo $i > f$i; i=$((i + 1)); done; head -c 100M /dev/zero > large";
    assert_eq!(live.sh(script).await, "");
    live
}

#[tokio::test]
async fn a_freeze_that_is_dropped_leaves_nothing() {
    const ME: &str = "layers::store::a_freeze_that_is_dropped_leaves_nothing";
    if !is_alone(ME) {
        return assert_passed(&alone(ME, &[]).output().unwrap());
    }
    adopt_orphans();
    let folder = open_folder();
    let store = ImageStore::open(StoreConfig::new(folder.path().join("store"))).unwrap();
    for millis in [0, 15, 40] {
        let live = busy().await;
        let processes = live.processes();
        let dropped = timeout(Duration::from_millis(millis), live.sandbox.freeze(&store)).await;
        let is_frozen = matches!(dropped, Ok(Ok(_)));
        drop((dropped, live));
        assert_all_end(processes).await;
        assert_no_children().await;
        assert!(is_frozen || files(store.dir()).is_empty(), "after {millis} ms");
    }
}

#[tokio::test]
async fn the_death_of_the_host_ends_the_freezer() {
    const ME: &str = "layers::store::the_death_of_the_host_ends_the_freezer";
    if let Some(place) = std::env::var_os("PLACE") {
        let store = ImageStore::open(StoreConfig::new(Path::new(&place).join("store"))).unwrap();
        let live = busy().await;
        // Beside the test's name on the same line.
        writeln!(std::io::stdout(), "\nREADY").unwrap();
        live.sandbox.freeze(&store).await.unwrap();
        std::future::pending::<()>().await;
    }
    if !is_alone(ME) {
        return assert_passed(&alone(ME, &[]).output().unwrap());
    }
    adopt_orphans();
    for millis in [5, 20, 60] {
        let folder = open_folder();
        let mut host = alone(ME, &[]).env("PLACE", folder.path()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(host.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "READY"));
        tokio::time::sleep(Duration::from_millis(millis)).await;
        host.kill().unwrap();
        host.wait().unwrap();
        assert_no_children().await;
    }
}
