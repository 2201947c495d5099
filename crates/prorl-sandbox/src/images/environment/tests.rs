use std::{fs, io::Write as _, os::unix::fs::symlink, process::Command};

use super::*;

/// An unpacked image with these scripts.
fn image(scripts: &[(&str, &[u8])]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join(FOLDER)).unwrap();
    for (name, text) in scripts {
        fs::write(root.path().join(FOLDER).join(name), text).unwrap();
    }
    root
}

fn read_all(root: &Path) -> (Vec<(String, String)>, Vec<String>) {
    let mut notes = Vec::new();
    let env = read(root, &mut notes).unwrap();
    (env, notes)
}

/// Reads one script; returns its variables as text, and the notes.
fn of(script: &str) -> (String, Vec<String>) {
    let (env, notes) = read_all(image(&[("90-environment.sh", script.as_bytes())]).path());
    let lines: Vec<String> = env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    (lines.join("|"), notes)
}

#[test]
fn what_a_registrys_image_sets_is_read_as_a_shell_reads_it() {
    let script = r#"#!/bin/sh
export PATH="/opt/my bin:/usr/bin"
export GREETING="${GREETING:-"good day"}"
export BARE="${BARE:-bare word}"
export EMPTY="${EMPTY:-""}"
export BRACE="${BRACE:-"a}b=c it's"}"
export LIST="${LIST:-"{\\\"a\\\": [1]}"}"
export LINES="${LINES:-"a\nb"}"
export WORD="${WORD:-"häh!"}"
"#;
    let (env, notes) = of(script);
    let expected = r#"BARE=bare word|BRACE=a}b=c it's|EMPTY=|GREETING=good day|LINES=a\nb|LIST={\"a\": [1]}|PATH=/opt/my bin:/usr/bin|WORD=häh!"#;
    assert_eq!((env.as_str(), notes), (expected, vec![]));
}

#[test]
fn plain_assignments_are_read() {
    for (script, env) in [
        ("export A=1", "A=1"),
        ("  export A='$x \"y\"'\t# why", "A=$x \"y\""),
        ("export A=\"it's \\$5 \\x\"", "A=it's $5 \\x"),
        ("A=1; export A;", "A=1"),
        ("A=1\nexport A", "A=1"),
        ("A=1", ""),
        ("export A=1\nA=2", "A=2"),
        ("export A=1 B=\"2 3\"; C=3 export=4; export C", "A=1|B=2 3|C=3"),
        ("export A=a\\ b'c'\"d\"e", "A=a bcde"),
        ("export A= B=", "A=|B="),
        ("export A=a#b", "A=a#b"),
        ("export A=1\nexport B=$A-${A}\"$A\"", "A=1|B=1-11"),
        ("export A=1; export A=0:$A", "A=0:1"),
        ("export A=${A:-x}; export A=${A:-y}", "A=x"),
        ("export A=; export A=${A:-y}", "A=y"),
        ("export A=1\nexport A=2 B=$A", "A=2|B=1"),
        ("A=1 B=$A; export A B", "A=1|B=1"),
        ("export PATH=/opt/bin:$PATH", &format!("PATH=/opt/bin:{}", crate::setup::PATH)),
        ("export LD_LIBRARY_PATH=/.singularity.d/libs", ""),
        ("export LD_LIBRARY_PATH=/opt/lib:/.singularity.d/libs", "LD_LIBRARY_PATH=/opt/lib"),
        ("export LD_LIBRARY_PATH=", "LD_LIBRARY_PATH="),
    ] {
        assert_eq!(of(script), (env.to_owned(), vec![]), "{script}");
    }
}

#[test]
fn what_is_not_plain_is_left_out_and_noted_once() {
    for line in [
        "export A=$(date)",
        "export A=`date`",
        "export A=$B",
        "export A=${B:+x}",
        "export A=${A:-$B}",
        "export A=~/x",
        "export A=*",
        "export A=[a]",
        "export A={a,b}",
        "export a.b=1",
        "export 1A=1",
        "export A-B=1",
        "export -n A",
        "A=1 env",
        "A=1 && B=2",
        "A=1|B=2",
        "A=1 &",
        "export A=1 > x",
        "unset A",
        "echo A=1",
        "export",
        "export B",
        ";A=1",
        "A=1;;B=2",
        "export A=\u{1}",
        "A=1\r",
        "export A=\"${A:-x\"",
        ". ./x",
        "export A=a\\",
        "export A=$",
        "export A=\"a$\"",
        "export A=$1",
        "A+=1",
        "A[0]=1",
        "A=(1)",
    ] {
        let (env, notes) = of(&format!("export OK=1\n{line}\n"));
        let expected = "left out variables: .singularity.d/env/90-environment.sh does more than set variables in 1 line, the first line 2";
        assert_eq!((env.as_str(), notes), ("OK=1", vec![expected.to_owned()]), "{line}");
    }
    let (env, notes) = of("export A=1\n\ncd /\ncd /\nexport B=2");
    assert_eq!(env, "A=1|B=2");
    assert!(notes[0].ends_with("in 2 lines, the first line 3"), "{notes:?}");
}

#[test]
fn what_is_not_done_always_is_left_out() {
    for (script, env) in [
        ("if [ -d /x ]; then\n  export A=1\nfi\nexport B=1", "B=1"),
        ("if true\nthen\nexport A=1; fi\nexport B=1", "B=1"),
        ("for x in a; do\nexport A=1\ndone\nexport B=1", "B=1"),
        ("case $x in\na)\nexport A=1\n;;\nesac\nexport B=1", "B=1"),
        ("f() {\nexport A=1\n}\nexport B=1", "B=1"),
        ("(\nexport A=1\n)\nexport B=1", "B=1"),
        ("export A=$(cat\nexport A=1\n)\nexport B=1", "B=1"),
        ("if a; then if b; then\nexport A=1\nfi\nexport A=2\nfi\nexport B=1", "B=1"),
        ("if a; then\necho fi 'fi' \"fi\"; echo \"\nexport A=1", ""),
        ("if a; then\n'fi'\nexport A=1\nfi\nexport B=1", "B=1"),
        ("echo \\\nexport A=1\nexport B=1", "B=1"),
        ("echo \\\n\nexport B=1", "B=1"),
        ("cat <<X\nexport A=1\nX", ""),
        ("echo '\nexport A=1\n'", ""),
        ("[ -f /x ] || return\nexport A=1", ""),
        ("if a; then exit 1; fi\nexport A=1", ""),
        ("echo it # it's\nexport B=1", "B=1"),
        ("echo if\nexport A=1", ""),
        ("a=$(case x in\ny) ;;\nesac\nexport A=1", ""),
    ] {
        let (found, notes) = of(script);
        assert_eq!((found.as_str(), notes.len()), (env, 1), "{script}: {notes:?}");
    }
}

#[test]
fn scripts_are_read_in_the_order_of_their_names() {
    let root = image(&[
        ("91-environment.sh", b"export A=$A:91"),
        ("10-docker2singularity.sh", b"export A=10"),
        ("90-environment.sh", b"export A=$A:90"),
        ("01-base.sh", b"export LAUNCHER=1; odd)"),
        ("94-appsbase.sh", b"export LAUNCHER=1; odd)"),
        ("95-apps.sh", b"export LAUNCHER=1; odd)"),
        ("99-base.sh", b"export LAUNCHER=1; odd)"),
        ("99-runtimevars.sh", b"export LAUNCHER=1; odd)"),
        ("92-other.txt", b"export OTHER=1"),
    ]);
    assert_eq!(read_all(root.path()), (vec![("A".to_owned(), "10:90:91".to_owned())], vec![]));
    assert_eq!(read_all(tempfile::tempdir().unwrap().path()), (vec![], vec![]));
}

#[test]
fn links_do_not_lead_out_of_the_image() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret.sh"), "export SECRET=1").unwrap();
    let secret = outside.path().join("secret.sh");
    let root = image(&[("30-plain.sh", b"export A=1")]);
    let folder = root.path().join(FOLDER);
    symlink(&secret, folder.join("10-absolute.sh")).unwrap();
    let up = "../".repeat(30);
    symlink(format!("{up}{}", secret.display()), folder.join("11-relative.sh")).unwrap();
    symlink("12-itself.sh", folder.join("12-itself.sh")).unwrap();
    symlink("/proc/self/environ", folder.join("13-proc.sh")).unwrap();
    symlink("/etc/inside", folder.join("14-inside.sh")).unwrap();
    fs::create_dir(root.path().join("etc")).unwrap();
    fs::write(root.path().join("etc/inside"), "export INSIDE=1").unwrap();
    nix::unistd::mkfifo(&folder.join("15-fifo.sh"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::create_dir(folder.join("16-folder.sh")).unwrap();
    let (env, notes) = read_all(root.path());
    let names: Vec<&str> = env.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["A", "INSIDE"]);
    assert_eq!(notes.len(), 6, "{notes:?}");

    // Nor does the folder itself.
    for target in [outside.path(), Path::new("/"), Path::new("env")] {
        fs::remove_dir_all(root.path().join(".singularity.d")).unwrap();
        fs::create_dir(root.path().join(".singularity.d")).unwrap();
        symlink(target, root.path().join(FOLDER)).unwrap();
        assert_eq!(read_all(root.path()).0, vec![], "{target:?}");
    }
    fs::remove_file(root.path().join(FOLDER)).unwrap();
    fs::write(root.path().join(FOLDER), "no folder").unwrap();
    assert_eq!(read_all(root.path()), (vec![], vec![]));
}

#[test]
fn what_is_large_or_no_text_is_left_out() {
    let large = "export LARGE=1\n".repeat(1 << 13);
    let doubled = format!("export A={}\n{}", "x".repeat(1 << 10), "export A=$A$A\n".repeat(4000));
    let many: Vec<String> = (0..4000).map(|number| format!("export V{number}=1\n")).collect();
    let nested = format!("export N={}", "${N:-".repeat(10_000));
    let one_line = format!("export O=1{}", " O=$O".repeat(10_000));
    let root = image(&[
        ("10.sh", large.as_bytes()),
        ("11.sh", b"\x7fELF\xff\0\nexport B=\xff\nexport C=a\0b\nexport D=1"),
        ("12.sh", doubled.as_bytes()),
        ("13.sh", nested.as_bytes()),
        ("14.sh", one_line.as_bytes()),
        ("15.sh", many.concat().as_bytes()),
    ]);
    for number in 20..60 {
        fs::write(root.path().join(FOLDER).join(format!("{number}.sh")), "A=1").unwrap();
    }
    let (env, notes) = read_all(root.path());
    assert!(env.iter().all(|(_, value)| value.len() <= MAX_VALUE_BYTES));
    assert_eq!(env.len(), MAX_VARIABLES);
    assert!(env.iter().any(|(name, _)| name == "D"));
    assert!(env.iter().all(|(name, _)| !["B", "C", "LARGE", "N", "O"].contains(&name.as_str())));
    assert!(notes[0].contains("alone, of 46"), "{notes:?}");
    assert!(notes[1].contains("10.sh is larger than"), "{notes:?}");
    assert!(notes[2].contains("11.sh does more than set variables in 3 lines, the first line 1"), "{notes:?}");

    // Nor are all together larger than can be handed to a program.
    let mut full = vec![format!("export X={}\n", "x".repeat(30_000))];
    full.extend((0..100).map(|number| format!("export X{number}=$X\n")));
    let (env, notes) = read_all(image(&[("10.sh", full.concat().as_bytes())]).path());
    assert!(env.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() <= MAX_BYTES);
    assert_eq!((env.len(), notes.len()), (8, 1));
}

/// Scripts that are put together at random; what is read of them without a note is what a shell makes of them.
#[test]
fn a_shell_agrees() {
    const PIECES: [&str; 24] = [
        "A",
        "B",
        "=",
        "=",
        "'",
        "\"",
        "$A",
        "$B",
        "${A}",
        "${B:-",
        "}",
        ":",
        ";",
        "\\",
        "\n",
        "\nexport ",
        "export A=",
        "export B=",
        "x",
        "y z",
        "#",
        " ",
        "\"${A:-\"",
        "\"}\"",
    ];
    if Command::new("bash").arg("--version").output().is_err() {
        let mut out = std::io::stderr().lock(); // unlike `eprintln`, shown of a test that passes
        return writeln!(out, "skipped a_shell_agrees: no bash here").unwrap();
    }
    let mut state = 1_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % below
    };
    let mut n_compared = 0;
    for _ in 0..20_000 {
        let body: String = (0..=random(9)).map(|_| PIECES[random(PIECES.len())]).collect();
        let script = format!("export A='1 2'\nexport B={body}\n");
        let mut variables = Variables::default();
        if source(script.as_bytes(), &mut variables).is_some() {
            continue;
        }
        let env = variables.into_env();
        let value = |wanted: &str| env.iter().find(|(name, _)| name == wanted).map_or("", |(_, value)| value);
        let expected = format!("A={}|B={}", value("A"), value("B"));
        let mut shell = Command::new("bash");
        shell.args(["--norc", "--noprofile", "-c", "eval \"$1\"; printf 'A=%s|B=%s' \"$A\" \"$B\"", "bash", &script]);
        let output = shell.env_clear().output().unwrap();
        assert_eq!((String::from_utf8(output.stdout).unwrap(), output.stderr), (expected, vec![]), "{script}");
        n_compared += 1;
        if n_compared == 200 {
            return;
        }
    }
    panic!("only {n_compared} were plain");
}
