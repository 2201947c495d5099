use std::{
    io::Read as _,
    os::unix::process::ExitStatusExt as _,
    process::{Child, Stdio},
    thread,
};

use super::*;
use crate::store::Collect;

/// How many moments a process is killed at, and the time between them.
const N_MOMENTS: u32 = 48;
const STEP: Duration = Duration::from_micros(150);

/// Starts a process that makes an image, and waits until it is about to.
fn start(test: &str, folder: &Path) -> Child {
    let mut child = alone(test, folder, &[]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let (out, mut read, mut byte) = (child.stdout.as_mut().unwrap(), Vec::new(), [0]);
    while !read.ends_with(b"now\n") {
        out.read_exact(&mut byte).unwrap();
        read.push(byte[0]);
    }
    child
}

#[test]
fn a_process_killed_at_any_moment_leaves_a_whole_image_or_none() {
    let test = "crash::a_process_killed_at_any_moment_leaves_a_whole_image_or_none";
    if let Some(folder) = told_folder() {
        let store = open(&folder.join("store"));
        println!("now");
        drop(ensure(&store, 1));
        return;
    }
    let (mut n_killed, mut n_made) = (0, 0);
    for moment in 0..N_MOMENTS {
        let (folder, store) = fresh();
        let mut child = start(test, folder.path());
        thread::park_timeout(STEP * moment);
        child.kill().unwrap();
        n_killed += u32::from(child.wait().unwrap().signal() == Some(9));
        let made = store.image(&digest(1)).unwrap();
        n_made += u32::from(made.is_some());
        made.inspect(|image| assert_whole(image.root()));
        drop(store);
        // The next try works at once, whatever is left.
        let store = open(&folder.path().join("store"));
        assert_whole(ensure(&store, 1).root());
        let done = store.collect(&Collect::default()).unwrap();
        assert!(done.left.is_empty() && done.removed.is_empty(), "{done:?}");
        assert_tidy(&store);
        // Of a process that died before it had written who it is, that is only known a minute later.
        let known = names(&store, "owners").into_iter().filter(|name| !name.starts_with("new-"));
        assert_eq!(known.count(), 1);
        assert_whole(hit(&store, 1).root());
    }
    assert!(n_killed > 0 && n_made < N_MOMENTS, "{n_killed} killed, {n_made} made");
}

#[test]
fn those_who_wait_for_a_killed_process_go_on_at_once() {
    let test = "crash::those_who_wait_for_a_killed_process_go_on_at_once";
    if let Some(folder) = told_folder() {
        let store = open(&folder.join("store"));
        let _never = store.ensure(&key(1), &|| false, &|_| {}, |root| {
            fs::write(root.join("half"), "")?;
            println!("now");
            loop {
                thread::park();
            }
            #[expect(unreachable_code, reason = "it is killed before")]
            Ok::<_, io::Error>(filled(1))
        });
        return;
    }
    let (folder, store) = fresh();
    let mut child = start(test, folder.path());
    let (waits, waiting) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..3 {
            let (waits, store) = (waits.clone(), open(store.dir()));
            scope.spawn(move || {
                let tell = |who: &str| waits.send(who.to_owned()).unwrap();
                let image = store.ensure(&key(1), &|| false, &tell, |root| fill(root, 1));
                assert_whole(image.unwrap().root());
            });
        }
        for _ in 0..3 {
            let who = waiting.recv().unwrap();
            assert!(who.starts_with(&format!("process {} on ", child.id())), "{who}");
        }
        child.kill().unwrap(); // and not reaped: it is dead all the same
    });
    child.wait().unwrap();
    drop(store.collect(&Collect::default()).unwrap());
    assert_tidy(&store);
}
