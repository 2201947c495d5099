//! The `str_replace_editor`, called as a model calls it.

use prorl_tools::host::{ToolContext, ToolResult, Toolbox};
use serde_json::{Value, json};

use crate::guest::{Guest, LONG};

/// Calls the editor; `arguments` has what is given besides the path.
async fn edit(guest: &Guest, path: &str, arguments: Value) -> ToolResult {
    edit_within(guest, path, arguments, 30_000).await
}

async fn edit_within(guest: &Guest, path: &str, mut arguments: Value, output_chars: usize) -> ToolResult {
    let toolbox = Toolbox::from_names(["editor"]).unwrap();
    let context = ToolContext { output_chars, ..ToolContext::new(guest.client(), LONG) };
    arguments["path"] = Value::from(path);
    toolbox.call(&context, "str_replace_editor", arguments.as_object().unwrap()).await.unwrap()
}

/// What the editor says when it did what was asked for.
async fn done(guest: &Guest, path: &str, arguments: Value) -> String {
    let result = edit(guest, path, arguments.clone()).await;
    assert!(!result.is_error, "{path} {arguments}: {}", result.content.text());
    result.content.text()
}

/// What it says when it did not.
async fn refused(guest: &Guest, path: &str, arguments: Value) -> String {
    let result = edit(guest, path, arguments.clone()).await;
    assert!(result.is_error, "{path} {arguments}: {}", result.content.text());
    result.content.text()
}

fn view() -> Value {
    json!({"command": "view"})
}

fn create(text: &str) -> Value {
    json!({"command": "create", "file_text": text})
}

fn replace(old: &str, new: &str) -> Value {
    json!({"command": "str_replace", "old_str": old, "new_str": new})
}

fn insert(line: u64, text: &str) -> Value {
    json!({"command": "insert", "insert_line": line, "new_str": text})
}

fn undo() -> Value {
    json!({"command": "undo_edit"})
}

async fn put(guest: &Guest, path: &str, bytes: &[u8]) {
    guest.client().write_file(path, bytes, 0o644, LONG).await.unwrap();
}

async fn get(guest: &Guest, path: &str) -> Vec<u8> {
    guest.client().read_file(path, 1 << 20, LONG).await.unwrap().bytes()
}

/// Runs a command that has to succeed.
async fn sh(guest: &Guest, command: &str) -> String {
    let (output, code) = guest.run(command).await;
    assert_eq!(code, 0, "{command}: {output}");
    output.trim_end().to_owned()
}

/// A new folder in the sandbox.
async fn folder(guest: &Guest) -> String {
    sh(guest, "mktemp -d").await
}

#[tokio::test]
async fn files_are_shown_with_the_numbers_of_their_lines() {
    let guest = Guest::start().await;
    let path = format!("{}/a", folder(&guest).await);
    put(&guest, &path, b"one\n\ttwo\nthree").await;
    let heading = format!("Here's the result of running `cat -n` on {path}:\n");
    assert_eq!(done(&guest, &path, view()).await, format!("{heading}     1\tone\n     2\t\ttwo\n     3\tthree\n"));
    let range = |first: i64, last: i64| json!({"command": "view", "view_range": [first, last]});
    assert_eq!(done(&guest, &path, range(2, 2)).await, format!("{heading}     2\t\ttwo\n"));
    assert_eq!(done(&guest, &path, range(3, -1)).await, format!("{heading}     3\tthree\n"));
    for (first, last) in [(4, -1), (2, 4), (4, 9)] {
        let told = refused(&guest, &path, range(first, last)).await;
        assert!(told.contains("first <= last <= 3") && told.ends_with("has 3 lines."), "{told}");
    }
    put(&guest, &path, b"").await;
    assert_eq!(done(&guest, &path, view()).await, format!("{heading}[The file is empty.]\n"));

    let told = refused(&guest, &format!("{path}/b"), view()).await;
    assert!(told.starts_with("Cannot open ") || told.starts_with("There is no "), "{told}");
    assert_eq!(refused(&guest, "/no/such", view()).await, "There is no file or folder /no/such.");
    let told = refused(&guest, "src/a.py", view()).await;
    assert!(told.starts_with("`path` must be absolute") && told.contains("/src/a.py is meant."), "{told}");
}

#[tokio::test]
async fn a_long_file_is_cut_at_lines_and_says_how_to_see_the_rest() {
    let guest = Guest::start().await;
    let path = format!("{}/long", folder(&guest).await);
    let text = (1..=5000).map(|n| format!("line {n}\n")).collect::<Vec<_>>().concat();
    put(&guest, &path, text.as_bytes()).await;
    let told = edit_within(&guest, &path, view(), 1000).await.content.text();
    assert!(told.chars().count() <= 1000 && told.chars().count() > 700, "{}", told.chars().count());
    let n_shown = told.matches("\tline ").count();
    assert!(
        told.contains(&format!("\tline {n_shown}\n[The lines from {} to 5000 are left out.", n_shown + 1)),
        "{told}"
    );
    // One line that is too long for all.
    put(&guest, &path, "é".repeat(100_000).as_bytes()).await;
    let told = edit_within(&guest, &path, view(), 1000).await.content.text();
    assert!(told.chars().count() <= 1000, "{}", told.chars().count());
    assert!(told.contains("[Line 1 has 100000 characters, of which "), "{told}");
}

#[tokio::test]
async fn a_folder_is_listed_two_levels_deep() {
    let guest = Guest::start().await;
    let top = folder(&guest).await;
    sh(&guest, &format!("cd {top} && mkdir -p b/c/d .git x && touch a b/f b/c/d/deep .hidden b/.h 'n\nl' && ln -s /etc x/link && ln -s none dangling")).await;
    assert_eq!(
        done(&guest, &top, view()).await,
        format!(
            "Here's the files and directories up to 2 levels deep in {top}, excluding hidden items:\n{top}/\n{top}/a\n\
             {top}/b/\n{top}/b/c/\n{top}/b/f\n{top}/dangling -> none\n{top}/n\u{fffd}l\n{top}/x/\n{top}/x/link -> /etc\n\
             [3 hidden items are left out. `ls -a` in execute_bash lists them.]\n"
        )
    );
    let told = refused(&guest, &top, json!({"command": "view", "view_range": [1, 2]})).await;
    assert!(told.contains("is a folder"), "{told}");
    sh(&guest, &format!("cd {top} && mkdir many && cd many && touch $(seq 3000)")).await;
    let told = edit_within(&guest, &format!("{top}/many"), view(), 100_000).await.content.text();
    assert!(
        told.lines().count() == 1003
            && told.ends_with("[2000 more are left out. `find` in execute_bash lists them.]\n")
    );
    let told = edit_within(&guest, &format!("{top}/many"), view(), 1000).await.content.text();
    assert!(told.chars().count() <= 1000, "{}", told.chars().count());
}

#[tokio::test]
async fn a_new_file_is_made_with_its_folders_and_never_over_another() {
    let guest = Guest::start().await;
    let top = folder(&guest).await;
    let path = format!("{top}/new/deep/a.txt");
    assert_eq!(done(&guest, &path, create("ä\r\n")).await, format!("File created successfully at: {path}"));
    assert_eq!(get(&guest, &path).await, "ä\r\n".as_bytes());
    assert_eq!(sh(&guest, &format!("umask; stat -c %a {path}; ls -1A {top}/new/deep")).await, "0022\n644\na.txt");
    let told = refused(&guest, &path, create("other")).await;
    assert!(told.contains("already. Change it with `str_replace`"), "{told}");
    assert_eq!(get(&guest, &path).await, "ä\r\n".as_bytes());
    for (what, told) in [("new", "is a folder"), ("new/x/", "is a folder"), ("a.txt/b", "Cannot create")] {
        sh(&guest, &format!("touch {top}/a.txt")).await;
        let text = refused(&guest, &format!("{top}/{what}"), create("x")).await;
        assert!(text.contains(told), "{text}");
    }
    // Not through a link to nothing either.
    sh(&guest, &format!("ln -s {top}/elsewhere {top}/link")).await;
    refused(&guest, &format!("{top}/link"), create("x")).await;
    sh(&guest, &format!("test ! -e {top}/elsewhere")).await;
}

#[tokio::test]
async fn a_text_is_replaced_where_it_is_the_only_one() {
    let guest = Guest::start().await;
    let path = format!("{}/f.py", folder(&guest).await);
    let text = (1..=20).map(|n| format!("x{n:02} = {n}\n")).collect::<Vec<_>>().concat();
    put(&guest, &path, text.as_bytes()).await;
    assert_eq!(
        done(&guest, &path, replace("x10 = 10\n", "y = 0\nz = 0\n")).await,
        format!(
            "The file {path} has been edited. Here's the result of running `cat -n` on a snippet of {path}:\n     6\tx06 = 6\n\
             \x20    7\tx07 = 7\n     8\tx08 = 8\n     9\tx09 = 9\n    10\ty = 0\n    11\tz = 0\n    12\tx11 = 11\n    13\tx12 = 12\n\
             \x20   14\tx13 = 13\n    15\tx14 = 14\n"
        )
    );
    let told = refused(&guest, &path, replace(" = 0\n", "")).await;
    assert!(told.contains("appears 2 times") && told.contains("in lines 10, 11."), "{told}");
    let told = refused(&guest, &path, replace("y  =  0", "")).await;
    assert!(
        told.contains("does not appear") && told.contains("At line 10 there is a text that differs in spaces"),
        "{told}"
    );
    assert!(refused(&guest, &path, replace("", "x")).await.starts_with("`old_str` is empty."));
    assert!(refused(&guest, &path, replace("y", "y")).await.contains("are the same"));
    assert_eq!(
        refused(&guest, &path, json!({"command": "str_replace"})).await,
        "Missing argument `old_str` of the command `str_replace`."
    );
    // Without a new text it is deleted.
    done(&guest, &path, json!({"command": "str_replace", "old_str": "z = 0\n"})).await;
    assert_eq!(get(&guest, &path).await, text.replace("x10 = 10", "y = 0").into_bytes());
}

#[tokio::test]
async fn lines_are_inserted_behind_a_line() {
    let guest = Guest::start().await;
    let path = format!("{}/f", folder(&guest).await);
    put(&guest, &path, b"b\nd").await;
    done(&guest, &path, insert(0, "a")).await;
    done(&guest, &path, insert(2, "c\n")).await;
    let told = done(&guest, &path, insert(4, "e")).await;
    assert!(told.ends_with("     1\ta\n     2\tb\n     3\tc\n     4\td\n     5\te\n"), "{told}");
    assert_eq!(get(&guest, &path).await, b"a\nb\nc\nd\ne");
    let told = refused(&guest, &path, insert(6, "f")).await;
    assert!(told.contains("must be from 0 to 5") && told.ends_with("and not 6."), "{told}");
}

#[tokio::test]
async fn changes_are_taken_back_one_by_one() {
    let guest = Guest::start().await;
    let path = format!("{}/f", folder(&guest).await);
    put(&guest, &path, b"start\n").await;
    assert!(refused(&guest, &path, undo()).await.contains("no change of"));
    for n in 0..12 {
        done(&guest, &path, insert(0, &n.to_string())).await;
    }
    // The last ten are kept.
    for n in (2..12).rev() {
        let first = format!("{n}\n");
        assert!(get(&guest, &path).await.starts_with(first.as_bytes()));
        let told = done(&guest, &path, undo()).await;
        assert!(
            told.contains("undone successfully. Here's the result") && told.contains(&format!("     1\t{}\n", n - 1))
        );
    }
    refused(&guest, &path, undo()).await;
    assert_eq!(get(&guest, &path).await, b"1\n0\nstart\n");

    // What another has done since is not lost.
    done(&guest, &path, replace("start", "end")).await;
    sh(&guest, &format!("echo more >> {path}")).await;
    assert!(refused(&guest, &path, undo()).await.contains("has been changed since by something else"));
    assert_eq!(get(&guest, &path).await, b"1\n0\nend\nmore\n");

    // A file that was made is removed, and by whatever name it is known.
    let made = format!("{path}.made");
    done(&guest, &made, create("x\n")).await;
    done(&guest, &made, replace("x", "y")).await;
    sh(&guest, &format!("ln -s {made} {path}.link")).await;
    done(&guest, &format!("{path}.link"), undo()).await;
    assert_eq!(get(&guest, &made).await, b"x\n");
    assert!(done(&guest, &made, undo()).await.ends_with("the file, which it had made, is removed."));
    sh(&guest, &format!("test ! -e {made}")).await;
}

#[tokio::test]
async fn bytes_that_are_not_edited_stay_as_they_are() {
    let guest = Guest::start().await;
    let path = format!("{}/f", folder(&guest).await);
    let utf16 =
        |text: &str| [&b"\xff\xfe"[..], &text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>()].concat();
    for (before, old, new, after) in [
        (b"a\r\nb\r\nc\r\n".to_vec(), "a\nb\n", "x\ny\nz\n", b"x\r\ny\r\nz\r\nc\r\n".to_vec()),
        (b"a\r\nb\nc\r\n".to_vec(), "b\n", "x\n", b"a\r\nx\nc\r\n".to_vec()),
        (b"\xef\xbb\xbfa\n".to_vec(), "a", "\u{e9}", b"\xef\xbb\xbf\xc3\xa9\n".to_vec()),
        (b"caf\xe9 1\xff".to_vec(), "\u{e9} 1", "\u{fc} 2", b"caf\xfc 2\xff".to_vec()),
        (utf16("a\r\nb\r\n"), "a\nb", "\u{20ac}", utf16("\u{20ac}\r\n")),
        (b"a\nb".to_vec(), "b", "c", b"a\nc".to_vec()),
    ] {
        put(&guest, &path, &before).await;
        done(&guest, &path, replace(old, new)).await;
        assert_eq!(get(&guest, &path).await, after, "{old:?} in {}", before.escape_ascii());
        done(&guest, &path, undo()).await;
        assert_eq!(get(&guest, &path).await, before);
    }
    put(&guest, &path, b"caf\xe9").await;
    assert!(
        done(&guest, &path, view())
            .await
            .ends_with("caf\u{e9}\n[The file is not UTF-8. It is shown, and kept, as Latin-1.]\n")
    );
    let told = refused(&guest, &path, replace("caf", "\u{20ac}")).await;
    assert!(told.contains("has no '\u{20ac}'"), "{told}");
    put(&guest, &path, b"a\r\nb\nc\r\n").await;
    assert!(done(&guest, &path, view()).await.contains("[2 of the 3 lines end with \\r\\n"));
}

#[tokio::test]
async fn a_file_stays_what_it_is_besides_its_text() {
    let guest = Guest::start().await;
    let top = folder(&guest).await;
    let path = format!("{top}/f");
    sh(&guest, &format!("cd {top} && echo a > f && chmod 4751 f && mkdir d && ln -s ../f d/link && umask 077")).await;
    let inode = sh(&guest, &format!("stat -c %i {path}")).await;
    done(&guest, &format!("{top}/d/link"), replace("a", "b")).await;
    assert_eq!(
        sh(&guest, &format!("cat {path}; stat -c %a {path}; readlink {top}/d/link; ls -1A {top} {top}/d")).await,
        format!("b\n4751\n../f\n{top}:\nd\nf\n\n{top}/d:\nlink")
    );
    // Another file took its place: who had it open still reads the old one, whole.
    assert_ne!(sh(&guest, &format!("stat -c %i {path}")).await, inode);

    // Two names remain names of one file.
    sh(&guest, &format!("ln {path} {top}/second")).await;
    let told = done(&guest, &path, replace("b", "longer text")).await;
    assert!(told.ends_with("[The file has several names (hard links), so it was written in place.]\n"), "{told}");
    assert_eq!(sh(&guest, &format!("cat {top}/second")).await, "longer text");
    done(&guest, &path, replace("longer text", "c")).await;
    assert_eq!(get(&guest, &path).await, b"c\n");
}

#[tokio::test]
async fn what_the_editor_cannot_do_is_refused_with_the_reason() {
    let guest = Guest::start().await;
    let top = folder(&guest).await;
    let path = |name: &str| format!("{top}/{name}");
    sh(&guest, &format!("cd {top} && head -c 20000000 /dev/zero | tr '\\0' x > huge && printf 'a\\0b' > binary && mkfifo pipe && ln -s loop loop")).await;
    for (name, told) in [
        (path("huge"), "has 20000000 bytes, and the editor takes files of 10485760 at most"),
        (path("binary"), "is a binary file of 3 bytes"),
        (path("pipe"), "is no file and no folder"),
        (path("loop"), "Cannot open"),
        ("/dev/zero".to_owned(), "is no file and no folder"),
        ("/proc/self/status".to_owned(), "made up by the kernel"),
    ] {
        for arguments in [view(), replace("a", "b"), insert(0, "a")] {
            let text = refused(&guest, &name, arguments).await;
            assert!(text.contains(told), "{text}");
        }
    }
    assert!(refused(&guest, &top, replace("a", "b")).await.contains("is a folder"));
}

#[tokio::test]
async fn a_file_or_folder_that_may_not_be_written() {
    let guest = Guest::start().await;
    if sh(&guest, "id -u").await == "0" {
        return skip("root may write everything");
    }
    let top = folder(&guest).await;
    let path = format!("{top}/f");
    sh(&guest, &format!("echo a > {path} && chmod 444 {path}")).await;
    let told = refused(&guest, &path, replace("a", "b")).await;
    assert!(told.starts_with(&format!("Cannot write {path}: ")) && told.contains("Permission denied"), "{told}");
    // A folder that takes no other file.
    sh(&guest, &format!("chmod 644 {path}; chmod 555 {top}")).await;
    let told = done(&guest, &path, replace("a", "b")).await;
    assert!(told.contains("so it was written in place."), "{told}");
    assert_eq!(get(&guest, &path).await, b"b\n");
    let told = refused(&guest, &format!("{top}/new"), create("x")).await;
    assert!(told.starts_with("Cannot create"), "{told}");
    sh(&guest, &format!("chmod 755 {top}")).await;
}

#[tokio::test]
async fn a_full_disk_leaves_files_as_they_were() {
    let guest = Guest::start().await;
    let top = folder(&guest).await;
    let path = format!("{top}/f");
    let text = "x\n".repeat(1 << 20);
    put(&guest, &path, text.as_bytes()).await;
    let free: u64 = sh(&guest, &format!("df --output=avail -B1 {top} | tail -1")).await.trim().parse().unwrap();
    if free > 1 << 30 {
        sh(&guest, &format!("rm -r {top}")).await;
        return skip("this guest has a disk that is not its own, or too large to be filled");
    }
    sh(&guest, &format!("echo b > {top}/one; ln {top}/one {top}/two; cat /dev/zero > {top}/fill; true")).await;
    let told = refused(&guest, &path, insert(0, "y")).await;
    assert!(told.contains("No space left"), "{told}");
    let told = refused(&guest, &format!("{top}/one"), replace("b", &"y".repeat(1 << 20))).await;
    assert!(told.contains("No space left"), "{told}");
    assert_eq!((get(&guest, &path).await.len(), get(&guest, &format!("{top}/two")).await), (1 << 20, b"b\n".to_vec()));
    assert_eq!(
        sh(&guest, &format!("ls -1A {top}; stat -c %s {path}")).await,
        format!("f\nfill\none\ntwo\n{}", text.len())
    );
}

#[tokio::test]
async fn two_edits_at_once_do_not_lose_each_other() {
    let guest = Guest::start().await;
    let path = format!("{}/f", folder(&guest).await);
    put(&guest, &path, b"").await;
    let edits = (0..20).map(|n| edit(&guest, &path, insert(0, &format!("{n}"))));
    let results = futures_util::future::join_all(edits).await;
    assert!(results.iter().all(|result| !result.is_error), "{results:?}");
    let mut lines: Vec<u32> =
        String::from_utf8(get(&guest, &path).await).unwrap().lines().map(|line| line.parse().unwrap()).collect();
    lines.sort_unstable();
    assert_eq!(lines, (0..20).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_text_that_no_frame_holds_is_refused() {
    let guest = Guest::start().await;
    let told = refused(&guest, "/tmp/huge", create(&"x".repeat(5 << 20))).await;
    assert!(told.starts_with("The text is too long: it has about 5242"), "{told}");
}

/// Says why a test cannot be done here.
fn skip(reason: &str) {
    use std::io::Write as _;
    let _said = writeln!(std::io::stderr(), "skipped: {reason}");
}
