//! Builds the guest itself, static and small, so that the library can carry it as bytes.
//!
//! A build script can ask for no artifact of its own package, so it runs cargo once more, for the binary of this same
//! package, into a target folder of its own. Its packages are some of the outer build's, so they are fetched already.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Set for the inner cargo, whose own build scripts must not start a third one.
const NESTED: &str = "PRORL_GUEST_NESTED";

/// What the outer cargo says about itself to its children and the inner one must not believe: flags and wrappers for the
/// outer target (clippy is such a wrapper), and settings of its build.
const OUTER_ONLY: &[&str] = &[
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_BUILD_RUSTFLAGS",
    "CARGO_BUILD_TARGET",
    "CARGO_BUILD_TARGET_DIR",
    "CARGO_TARGET_DIR",
    "RUSTC_WORKSPACE_WRAPPER",
    "RUSTC_WRAPPER",
    "CLIPPY_ARGS",
    "LLVM_PROFILE_FILE",
];

fn main() {
    let out_dir = PathBuf::from(variable("OUT_DIR"));
    let carried = out_dir.join("guest.bin");
    println!("cargo:rustc-env=PRORL_GUEST_PATH={}", carried.display());
    println!("cargo:rerun-if-env-changed={NESTED}");
    let nested = env::var_os(NESTED).is_some();
    if nested || variable("CARGO_CFG_TARGET_OS") != "linux" {
        // The inner build's library is thrown away, and elsewhere there are no sandboxes.
        fs::write(&carried, []).expect("OUT_DIR is writable");
        return;
    }
    let package = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    watch(&package);
    let built = build(&package, &out_dir.join("guest"));
    // Replaced in one step: a build stopped in the middle leaves the old one or the new one.
    let fresh = out_dir.join("guest.new");
    fs::copy(built, &fresh).expect("OUT_DIR is writable");
    fs::rename(fresh, carried).expect("OUT_DIR is writable");
}

/// Names everything that the guest is made from.
fn watch(package: &Path) {
    let root = package.join("../..");
    for made_from in [
        "bins/prorl-guest/build.rs",
        "bins/prorl-guest/src/main.rs",
        "bins/prorl-guest/Cargo.toml",
        "crates/prorl-core/src",
        "crates/prorl-core/Cargo.toml",
        "crates/prorl-sandbox/src",
        "crates/prorl-sandbox/Cargo.toml",
        "crates/prorl-tools/src",
        "crates/prorl-tools/Cargo.toml",
        "Cargo.lock",
        "Cargo.toml",
    ] {
        println!("cargo:rerun-if-changed={}", root.join(made_from).display());
    }
}

/// Runs the inner cargo and returns the program's path.
fn build(package: &Path, target_dir: &Path) -> PathBuf {
    let target = variable("TARGET");
    let mut cargo = Command::new(variable("CARGO"));
    for name in OUTER_ONLY {
        cargo.env_remove(name);
    }
    // An explicit target keeps the flags away from build scripts and macros, which cannot be static.
    cargo
        .args(["build", "--quiet", "--profile", "guest", "--bin", "prorl-guest"])
        .args(["--target", &target])
        .arg("--manifest-path")
        .arg(package.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(target_dir)
        .env(NESTED, "1")
        .env("RUSTFLAGS", "-C target-feature=+crt-static");
    if package.join("../../Cargo.lock").exists() {
        cargo.arg("--locked");
    }
    let status = cargo.status().expect("the cargo that runs this script can be run");
    assert!(status.success(), "building the guest for {target} failed: {status}");
    target_dir.join(target).join("guest").join("prorl-guest")
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|error| panic!("cargo sets {name}: {error}"))
}
