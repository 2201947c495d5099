//! Images by name, packed ones, and what cannot be had.

use prorl_agents::{Environment, PathPolicy};
use prorl_core::{FailureClass, Status};
use prorl_pipeline::SubmitError;
use prorl_sandbox::{
    images::{Cancel, Quiet, Source, Unpacker},
    store::{Collect, Digest, Filled, ImageName, ImageStore, SourceKey},
};
use serde_json::{Value, json};

use crate::support::{
    Rig, bash, close, finish, give_to_sandboxes, image, observed, open_temp, packed, request, singularity, skip, store,
};

fn name(text: &str) -> ImageName {
    ImageName::try_from(text.to_owned()).unwrap()
}

fn fields(image: &Value) -> Value {
    json!({"image": image, "tools": ["bash", "finish"]})
}

fn turns() -> [String; 2] {
    [bash("cat /etc/mark; ls /; echo \"<$MARK>\""), finish()]
}

/// Unpacks a folder into the store by a name.
fn put(store: &ImageStore, folder: &std::path::Path, as_name: &str) {
    let source = Source::parse(folder.to_str().unwrap()).unwrap();
    let image = Unpacker::new(store.clone()).unpack(&source, &Cancel::default(), &Quiet).unwrap();
    store.set_name(&name(as_name), &image.filled().digest).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_of_the_store_is_had_by_name_wherever_paths_may_lead() {
    let temp = open_temp();
    let store = store(temp.path());
    let folder = image(temp.path());
    put(&store, &folder, "suite/tiny:1");
    put(&store, &folder, "registry.example/a/b:latest");
    let no_paths = PathPolicy::Below(vec![temp.path().join("nothing")]);
    let rig = Rig::start(&turns(), Some(&store), |env| env.paths = no_paths).await;
    for text in ["suite/tiny:1", "registry.example/a/b:latest", "docker://registry.example/a/b"] {
        let result = rig.run(None, &fields(&json!(text))).await;
        assert_eq!((result.outcome.status, result.image.as_str()), (Status::Completed, text), "{:?}", result.error);
        assert!(observed(&result)[0].starts_with("of the image"), "{:?}", observed(&result));
    }
    let refused = rig.pipeline.submit(request(None, &fields(&json!(folder)))).err().unwrap();
    assert!(refused.to_string().contains("not below a folder that the server allows"), "{refused}");
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_comes_before_a_path_and_can_be_the_servers_own_image() {
    let temp = open_temp();
    let store = store(temp.path());
    // The crate's own folder has one that is called so.
    put(&store, &image(temp.path()), "src");
    let is_path_too = std::path::Path::new("src").is_dir();
    let runtimes = |env: &mut Environment| {
        env.runtimes = env.runtimes.clone().with_default_image(Some("src".into()));
        env.paths = PathPolicy::Below(vec![]);
    };
    let rig = Rig::start(&turns(), Some(&store), runtimes).await;
    for word in [json!("src"), json!(null)] {
        let result = rig.run(None, &fields(&word)).await;
        assert_eq!((result.outcome.status, result.image.as_str()), (Status::Completed, "src"), "{:?}", result.error);
        assert!(observed(&result)[0].starts_with("of the image"), "{:?}", observed(&result));
    }
    let refused = rig.pipeline.submit(request(None, &fields(&json!("./src")))).err().unwrap();
    let why = if is_path_too { "./src is not below a folder" } else { "./src cannot be opened" };
    assert!(refused.to_string().contains(why), "{refused}");
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn variables_of_an_image_are_set_inside() {
    let temp = open_temp();
    let store = store(temp.path());
    let folder = image(temp.path());
    let key = SourceKey::new("an image with a variable");
    let make = |root: &std::path::Path| -> std::io::Result<Filled> {
        let copied = std::process::Command::new("cp").arg("-a").arg(folder.join(".")).arg(root).status()?;
        assert!(copied.success());
        give_to_sandboxes(root);
        let (digest, env) = (Digest::from_bytes([7; 32]), vec![("MARK".to_owned(), "a b".to_owned())]);
        Ok(Filled { digest, source: "a test".to_owned(), entries: 1, bytes: 1, env, notes: vec![] })
    };
    let stored = store.ensure(&key, &|| false, &|_| {}, make).unwrap();
    store.set_name(&name("marked"), &stored.filled().digest).unwrap();
    let rig = Rig::start(&turns(), Some(&store), |_| {}).await;
    let result = rig.run(None, &fields(&json!("marked"))).await;
    assert!(observed(&result)[0].contains("<a b>"), "{:?} {:?}", observed(&result), result.error);
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_store_does_not_have_is_told_with_what_it_has() {
    let temp = open_temp();
    let store = store(temp.path());
    let folder = image(temp.path());
    let rig = Rig::start(&turns(), Some(&store), |_| {}).await;
    let problem = |text: &str| match rig.pipeline.submit(request(None, &fields(&json!(text)))).err() {
        Some(SubmitError::InvalidInstance(problem)) => problem.to_string(),
        other => panic!("{text}: {other:?}"),
    };
    assert!(problem("python").ends_with("that is there; the store has no names"), "{}", problem("python"));
    for number in 10..22 {
        put(&store, &folder, &format!("swe-{number}"));
    }
    let told = problem("python");
    assert!(told.starts_with("instance.image: python is neither"), "{told}");
    assert!(
        told.ends_with(
            "the store has swe-10, swe-11, swe-12, swe-13, swe-14, swe-15, swe-16, swe-17, swe-18, swe-19 and 2 more"
        ),
        "{told}"
    );
    let told = problem("docker://python:3.12");
    assert!(told.ends_with("unpack it first: prorl image unpack docker://python:3.12"), "{told}");
    assert!(problem("oras://x/y").contains("build or pull it first"));
    assert!(problem("/nonexistent/image.sif").contains("/nonexistent/image.sif cannot be opened"));
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_packed_image_is_unpacked_once_and_runs_without_a_mount() {
    let temp = open_temp();
    let Some(file) = packed(temp.path()) else { return skip("no mksquashfs here") };
    let store = store(temp.path());
    let rig = Rig::start(&turns(), Some(&store), |_| {}).await;
    let jobs: Vec<_> = (0..8).map(|_| rig.submit(None, &fields(&json!(file)))).collect();
    for job in &jobs {
        let result = job.result().await;
        assert_eq!(result.outcome.status, Status::Completed, "{:?}", result.error);
        assert!(observed(&result)[0].starts_with("of the image"));
    }
    assert_eq!(store.list().unwrap().len(), 1);
    // A group's layer lies over it too.
    let jobs: Vec<_> = (0..3)
        .map(|_| {
            let mut fields = fields(&json!(file));
            fields["setup"] = json!("echo of the layer > /etc/mark");
            fields["fakeroot"] = json!(true);
            rig.submit(Some("g"), &fields)
        })
        .collect();
    for job in &jobs {
        let result = job.result().await;
        assert_eq!(result.outcome.status, Status::Completed, "{:?}", result.error);
        assert!(observed(&result)[0].starts_with("of the layer"), "{:?}", observed(&result));
    }
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_image_is_the_images_failure() {
    let temp = open_temp();
    let store = store(temp.path());
    let file = temp.path().join("broken.sif");
    std::fs::write(&file, "nothing of the kind").unwrap();
    let rig = Rig::start(&turns(), Some(&store), |_| {}).await;
    let result = rig.run(None, &fields(&json!(file))).await;
    assert_eq!((result.outcome.failure_class, result.attempt), (Some(FailureClass::Image), 1));
    assert!(result.error.as_deref().unwrap().contains("broken.sif"), "{:?}", result.error);
    assert!(store.list().unwrap().is_empty());
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_singularity_runtime_starts_what_the_store_has_unpacked_too() {
    let Some(singularity) = singularity() else { return skip("no apptainer here") };
    let temp = open_temp();
    let Some(file) = packed(temp.path()) else { return skip("no mksquashfs here") };
    let store = store(temp.path());
    let set_up = |env: &mut Environment| env.runtimes = env.runtimes.clone().with_singularity(Ok(singularity));
    let rig = Rig::start(&turns(), Some(&store), set_up).await;
    let mut asked = fields(&json!(file));
    asked["runtime"] = json!("singularity");
    let result = rig.run(None, &asked).await;
    assert_eq!(result.outcome.status, Status::Completed, "{:?}", result.error);
    assert!(observed(&result)[0].starts_with("of the image"), "{:?}", observed(&result));
    assert_eq!(store.list().unwrap().len(), 1, "it was unpacked, not mounted");
    asked["setup"] = json!("echo of the layer > mark");
    let jobs = [(); 2].map(|()| rig.submit(Some("g"), &asked));
    for job in &jobs {
        let result = job.result().await;
        assert_eq!(result.outcome.status, Status::Completed, "{:?}", result.error);
    }
    rig.pipeline.close().await;
}

/// Removes all that nobody holds.
fn collect(store: &ImageStore) {
    let unused = Some(std::time::Duration::ZERO);
    store.collect(&Collect { unused_for: unused, ..Collect::default() }).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_holds_its_own_image_whatever_becomes_of_the_name() {
    let temp = open_temp();
    let store = store(temp.path());
    let folder = image(temp.path());
    put(&store, &folder, "own");
    let own = |env: &mut Environment| env.runtimes = env.runtimes.clone().with_default_image(Some("own".into()));
    let rig = Rig::start(&turns(), Some(&store), own).await;
    std::fs::write(folder.join("etc/mark"), "of another image\n").unwrap();
    for is_moved in [true, false] {
        if is_moved {
            put(&store, &folder, "own");
        } else {
            store.remove_name(&name("own")).unwrap();
        }
        collect(&store);
        let mut shared = fields(&json!(null));
        shared["setup"] = json!("echo more > /tmp/more");
        for (group, fields) in [(None, fields(&json!(null))), (Some("g"), shared)] {
            let result = rig.run(group, &fields).await;
            assert_eq!((result.outcome.status, &*result.image), (Status::Completed, "own"), "{:?}", result.error);
            assert!(observed(&result)[0].starts_with("of the image"), "{:?}", observed(&result));
        }
    }
    rig.pipeline.close().await;
    drop(rig);
    collect(&store);
    assert!(store.list().unwrap().is_empty(), "it is held no longer than the server is there");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_packed_image_of_the_servers_own_is_unpacked_at_its_start() {
    let temp = open_temp();
    let Some(file) = packed(temp.path()) else { return skip("no mksquashfs here") };
    let store = store(temp.path());
    let own = |env: &mut Environment| env.runtimes = env.runtimes.clone().with_default_image(Some(file.clone()));
    let rig = Rig::start(&turns(), Some(&store), own).await;
    std::fs::remove_file(&file).unwrap();
    collect(&store);
    let result = rig.run(None, &fields(&json!(null))).await;
    assert_eq!(result.outcome.status, Status::Completed, "{:?}", result.error);
    assert!(observed(&result)[0].starts_with("of the image"), "{:?}", observed(&result));
    rig.pipeline.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_packed_image_runs_as_it_is_where_the_store_takes_none() {
    let Some(singularity) = singularity() else { return skip("no apptainer here") };
    let temp = open_temp();
    let Some(file) = packed(temp.path()) else { return skip("no mksquashfs here") };
    let store = store(temp.path());
    let set_up = |env: &mut Environment| env.runtimes = env.runtimes.clone().with_singularity(Ok(singularity));
    let rig = Rig::start(&turns(), Some(&store), set_up).await;
    close(&store, "staging");
    let mut asked = fields(&json!(file));
    for runtime in ["singularity", "namespace"] {
        asked["runtime"] = json!(runtime);
        let result = rig.run(None, &asked).await;
        if runtime == "namespace" {
            assert_eq!(result.outcome.failure_class, Some(FailureClass::Image), "it can start no packed one");
            continue;
        }
        assert_eq!(result.outcome.status, Status::Completed, "{:?}", result.error);
        assert!(observed(&result)[0].starts_with("of the image"), "{:?}", observed(&result));
        let [warning] = &*result.warnings else { panic!("{:?}", result.warnings) };
        assert!(warning.contains("is used packed: failed to"), "{warning}");
    }
    rig.pipeline.close().await;
}
