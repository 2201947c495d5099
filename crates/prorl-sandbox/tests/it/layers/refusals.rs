//! What is not frozen, and what is not started on.

use std::fs;

use prorl_core::FailureClass;
use prorl_sandbox::{FreezeError, Image, SandboxError, SandboxSpec, store::Layer};
use prorl_tools::host::BashCall;

use super::{Field, layers_in};
use crate::{
    contract::open_folder,
    support::{LONG, Live},
};

pub(super) async fn what_runs_is_named_and_may_end(field: &Field) {
    let live = field.start(&[]).await;
    let wait = "while read -r name < /proc/$!/comm; test $name != sleep; do :; done";
    live.sh(&format!("setsid sleep 1000 >/dev/null 2>&1 & echo $! > /tmp/pid; {wait}; echo x > kept")).await;
    live.tools.bash(&BashCall::new("sleep 1000 &"), LONG).await.unwrap();
    let error = live.sandbox.freeze(&field.store).await.unwrap_err();
    assert_eq!(error.failure_class(), FailureClass::Handler);
    let FreezeError::Running { processes, .. } = &error else { panic!("{error:?}") };
    let pid = live.sh("cat /tmp/pid").await;
    assert!(processes.contains(&format!("sleep (pid {pid})")), "{error}");
    assert!(processes.iter().any(|name| name.starts_with("bash (pid ")), "{error}");
    assert_eq!(processes.len(), 3, "{error}");
    // It goes on as if nothing had been.
    for name in processes {
        let pid = name.trim_end_matches(')').rsplit(' ').next().unwrap();
        live.sh(&format!("kill -9 {pid}; while kill -0 {pid} 2>/dev/null; do :; done")).await;
    }
    assert_eq!(live.sh("cat kept").await, "x");
    let layer = field.freeze(&live).await;
    let gone = live.sandbox.freeze(&field.store).await.unwrap_err();
    assert!(matches!(gone, FreezeError::Gone { .. }), "{gone:?}");
    let live = field.start(&[&layer]).await;
    assert_eq!(live.sh("cat kept").await, "x");
    live.sandbox.shutdown(LONG).await.unwrap();
    assert!(matches!(live.sandbox.freeze(&field.store).await, Err(FreezeError::Gone { .. })));

    let live = Live::start_on(&*field.ground.runtime, &SandboxSpec { freezable: false, ..field.spec.clone() }).await;
    let error = live.sandbox.freeze(&field.store).await.unwrap_err();
    assert!(matches!(error, FreezeError::NotFreezable { .. }), "{error:?}");
    assert_eq!(live.sh("echo on").await, "on");
    live.shut().await;
}

pub(super) async fn a_layer_means_nothing_elsewhere(field: &Field) {
    let first = field.layer("echo 1 > one").await;
    let live = field.start(&[&first]).await;
    live.sh("echo 2 > two").await;
    let second = field.freeze(&live).await;
    let other = open_folder();
    fs::create_dir_all(other.path().join("etc")).unwrap();
    let [one, two] = [&first, &second].map(|layer| layer.record().id.clone());
    let refused = async |layers: &[&Layer], image: Option<Image>| {
        let image = image.unwrap_or_else(|| field.spec.image.clone());
        let layers = layers.iter().map(|layer| (*layer).clone()).collect();
        let error = field.ground.runtime.start(&SandboxSpec { layers, image, ..field.spec.clone() }).await.unwrap_err();
        assert!(matches!(error, SandboxError::Invalid { what: "layers", .. }), "{error:?}");
        error.to_string()
    };
    let elsewhere = Image::Directory(other.path().to_owned());
    let text = refused(&[&first], Some(elsewhere)).await;
    assert!(text.contains(&one) && text.contains(&*other.path().canonicalize().unwrap().to_string_lossy()), "{text}");
    let text = refused(&[&second], None).await;
    assert!(text.contains(&format!("layer {two} was frozen over layers [{one}], and here it lies over []")), "{text}");
    let text = refused(&[&second, &first], None).await;
    assert!(text.contains(&two), "{text}");
    let text = refused(&[&first, &first], None).await;
    assert!(text.contains(&format!("over layers [], and here it lies over [{one}]")), "{text}");
    assert_eq!(layers_in(&field.store), 2);
}
