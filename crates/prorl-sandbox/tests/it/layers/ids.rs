//! Layers with files of a fake root's other ids.

use std::{fs, os::unix::fs::MetadataExt as _, sync::Arc};

use prorl_core::hello::FakeRoot;
use prorl_sandbox::{
    Bind, NamespaceConfig, NamespaceRuntime, Runtime, SandboxError, SandboxSpec, SandboxUser, SingularityConfig,
    SingularityRuntime,
    store::{ImageStore, Layer, LayerUsers, StoreConfig},
};

use crate::{
    contract::{Ground, open_folder},
    fakeroot::user_with_range,
    support::{LONG, Live, is_root, node, skip},
};

/// Gives files away, as far as a fake root can.
const GIVE: &str = "
set -e
echo x > given; chown 33:44 given; chmod 6755 given; echo y > grouped; chown 0:7 grouped; ln -s nowhere link; chown -h 5:6 link
mkdir folder; chown 65534:33 folder; chmod 2750 folder; echo z > folder/file; chown 1:1 folder/file; ln given folder/linked
mkdir -p /srv/x; chown 99:99 /srv /srv/x
if command -v setcap >/dev/null; then cp /bin/cat tool; chown 3:3 tool; setcap cap_net_bind_service+ep tool; fi
";

const LOOK: &str = "
cd /workspace
stat -c '%n %u:%g %a %h' given grouped link folder folder/file folder/linked /srv /srv/x
cat folder/file; test given -ef folder/linked && echo one
if command -v getcap >/dev/null; then getcap tool; stat -c '%u:%g %a' tool; fi
";

/// Empties a layer, as another fake root can and an ordinary user cannot.
async fn empty(runtime: &dyn Runtime, spec: &SandboxSpec, layer: &Layer) {
    let bind = Bind { source: layer.root().to_owned(), target: "/workspace/root".into(), writable: true };
    let live = Live::start_on(runtime, &SandboxSpec { binds: vec![bind], ..spec.clone() }).await;
    assert_eq!(live.sh("rm -rf root/*; ls -A root").await, "");
    live.shut().await;
}

async fn owners_are_kept(ground: &Ground, runtime: &dyn Runtime) {
    let folder = open_folder();
    let store = ImageStore::open(StoreConfig::new(folder.path().join("store"))).unwrap();
    let spec = SandboxSpec { fakeroot: true, freezable: true, start_timeout: LONG, ..ground.spec() };
    let live = Live::start_on(runtime, &spec).await;
    assert_eq!(live.sandbox.facts().hello.fakeroot, Some(FakeRoot::Range));
    assert_eq!(live.sh(GIVE).await, "");
    let before = live.sh(LOOK).await;
    assert!(before.contains("given 33:44 6755 2") && before.contains("link 5:6"), "{before}");
    let layer = live.sandbox.freeze(&store).await.unwrap();
    assert_eq!(layer.record().users, LayerUsers::Range);
    let owner = fs::symlink_metadata(layer.root().join("workspace/grouped")).unwrap();
    assert!(owner.gid() > 1000 && owner.uid() != 0, "{owner:?}");

    let on_top = SandboxSpec { layers: vec![layer.clone()], ..spec.clone() };
    let live = Live::start_on(runtime, &on_top).await;
    assert_eq!(live.sh(LOOK).await, before);
    assert_eq!(live.sh("chown 0:0 given folder; echo w >> folder/file; stat -c %u:%g folder/file").await, "1:1");
    live.shut().await;

    let error = runtime.start(&SandboxSpec { fakeroot: false, ..on_top.clone() }).await.unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error, SandboxError::Invalid { what: "layers", .. }) && text.contains(&layer.record().id),
        "{text}"
    );
    if is_root() && ground.name == "namespace" {
        // The user that root's sandboxes are by default has no range.
        let single = NamespaceRuntime::new(node(), NamespaceConfig::default());
        let error = single.start(&on_top).await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, SandboxError::Invalid { what: "layers", .. }), "{error:?}");
        assert!(text.contains(&layer.record().id) && text.contains("subuid"), "{text}");
    }
    empty(runtime, &spec, &layer).await;
}

/// The user to run as. Nothing, and said so, where there is none with a range.
async fn user(test: &str, ground: &Ground) -> Option<Option<SandboxUser>> {
    if is_root() {
        let user = user_with_range();
        if user.is_none() {
            skip(test, "no user of this machine has a range of ids");
        }
        return user.map(Some);
    }
    let live = Live::start_on(&*ground.runtime, &SandboxSpec { fakeroot: true, ..ground.spec() }).await;
    let range = live.sandbox.facts().hello.fakeroot.clone();
    live.shut().await;
    if let Some(FakeRoot::Single { missing }) = range {
        skip(test, &missing);
        return None;
    }
    Some(None)
}

#[tokio::test]
async fn owners_are_kept_by_namespaces() {
    const ME: &str = "layers::ids::owners_are_kept_by_namespaces";
    let ground = Ground::namespace(ME).unwrap();
    let Some(sandbox_user) = user(ME, &ground).await else { return };
    owners_are_kept(&ground, &NamespaceRuntime::new(node(), NamespaceConfig { sandbox_user })).await;
}

#[tokio::test]
async fn owners_are_kept_by_a_launcher() {
    const ME: &str = "layers::ids::owners_are_kept_by_a_launcher";
    for ground in [Ground::singularity(ME), Ground::packed(ME)].into_iter().flatten() {
        let Some(sandbox_user) = user(ME, &ground).await else { return };
        let config = SingularityConfig { sandbox_user, ..SingularityConfig::default() };
        let runtime: Arc<dyn Runtime> = Arc::new(SingularityRuntime::new(node(), config).unwrap());
        owners_are_kept(&ground, &*runtime).await;
    }
}
