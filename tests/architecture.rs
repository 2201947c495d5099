//! The dependency table of ARCHITECTURE.md is what the manifests say.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

mod support;

/// Reads the table: crate → the crates that it may depend on.
fn allowed() -> BTreeMap<String, BTreeSet<String>> {
    let text = std::fs::read_to_string(support::root().join("ARCHITECTURE.md")).unwrap();
    let full = |name: &str| match name {
        "embed-sandbox" | "embed-tools" | "make-tokenizer" => name.to_owned(),
        name if name == "prorl" || name.starts_with("prorl-") => name.to_owned(),
        name => format!("prorl-{name}"),
    };
    text.lines()
        .skip_while(|line| !line.starts_with("| crate | depends on"))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<_> = line.split('|').map(str::trim).collect();
            let names = cells[2].split(',').map(str::trim).filter(|name| *name != "-");
            (full(cells[1]), names.map(full).collect())
        })
        .collect()
}

#[test]
fn no_crate_depends_on_one_that_the_table_does_not_name() {
    let Some(cargo) = option_env!("CARGO").filter(|cargo| std::path::Path::new(cargo).exists()) else {
        println!("skipped: the cargo that built this test is absent");
        return;
    };
    let metadata = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(support::root())
        .output()
        .unwrap();
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let ours: BTreeSet<&str> = packages.iter().map(|package| package["name"].as_str().unwrap()).collect();
    let allowed = allowed();

    let mut problems = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap();
        let Some(row) = allowed.get(name) else {
            problems.push(format!("{name} has no row in ARCHITECTURE.md"));
            continue;
        };
        for dependency in package["dependencies"].as_array().unwrap() {
            let other = dependency["name"].as_str().unwrap();
            let counts = dependency["kind"] != "dev" && ours.contains(other);
            if counts && !row.contains(other) {
                problems.push(format!("{name} depends on {other}, which its row in ARCHITECTURE.md does not name"));
            }
        }
    }
    for name in allowed.keys().filter(|name| !ours.contains(name.as_str())) {
        problems.push(format!("ARCHITECTURE.md has a row for {name}, which does not exist"));
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}
