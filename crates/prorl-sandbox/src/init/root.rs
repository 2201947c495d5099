//! The root file system of a sandbox, built by process 1 in its own mount namespace.
//!
//! It is built on a *stage*: a small tmpfs that becomes the root first, with the host's tree at `/host`, so that no path of
//! the new tree can hide one of the host that is still needed. Then the new tree becomes the root and the stage, with
//! the host's tree on it, is detached: nothing of it can be reached any more.

use std::{
    fs,
    os::{
        fd::OwnedFd,
        unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::{Component, Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::stat::Mode,
    unistd::{chdir, pivot_root},
};
use prorl_core::hello::StartFailure;

use super::{
    At,
    binds::{self, Layers},
    etc,
    lower::{Lower, add_layer, overlay},
    made, proc,
    stack::{Found, LAYERS, Said, Stack, make_folder},
};
use crate::{
    setup::{HOME, Image, Setup, WORKSPACE, step},
    sys::{self, Seal},
};

/// The host's tree, on the stage.
pub(super) const HOST: &str = "/host";
/// The sandbox's tree, on the stage.
pub(super) const ROOT: &str = "/root";
/// The tmpfs that everything written inside goes to, on the stage.
const LAYER: &str = "/layer";
/// What is written to the sandbox's root, in that tmpfs: one tree, whatever its parts lie over.
pub(super) const WRITTEN: &str = "root";
/// The tmpfs for the guest's own files, on the stage.
const SCRATCH: &str = "/scratch";
/// Its size: for the text of the commands that run at one time.
const SCRATCH_BYTES: u64 = 32 << 20;
/// The unpacked image under a name that overlayfs can take, on the stage.
const IMAGE: &str = "/image";

/// Top folders of the host that hold programs.
const PROGRAMS: &[&str] = &["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// Folders that every sandbox has, relative to its root.
const FOLDERS: &[&str] = &["dev", "etc", "proc", "root", "run", "tmp", "var/tmp"];

/// Top folders of an image that are the sandbox's own where they cannot be put under a writable layer.
const OWN: &[&str] = &["etc", "home", "root", "run", "sys", "workspace"];

/// Top folders of an image that something else is mounted on, whatever they hold; the last is a launcher's.
pub(super) const COVERED: &[&str] = &["dev", "proc", "tmp", ".prorl"];

/// A file in an image's root above this size is shown read-only instead of copied, in bytes.
const MAX_COPY_BYTES: u64 = 1 << 20;

/// Device nodes that are shown inside.
const DEVICES: &[&str] = &["full", "null", "random", "tty", "urandom", "zero"];

/// Terminals that a sandbox can have. Without a limit one sandbox could take all that the host has.
const TERMINALS: u32 = 64;

pub(super) const NO_DEVICES: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);
pub(super) const NO_PROGRAMS: MsFlags = NO_DEVICES.union(MsFlags::MS_NOEXEC);

/// What is left to hold of a tree that was entered.
pub(super) struct Built {
    /// The tmpfs that is written to, to ask what of it is free.
    pub(super) layer: OwnedFd,
    /// The same to be read, if it is to be frozen.
    pub(super) kept: Option<OwnedFd>,
    /// The tmpfs for the guest's own files.
    pub(super) scratch: OwnedFd,
    /// Whether the kernel limits what System V objects take.
    pub(super) ipc_is_limited: bool,
}

/// Builds the tree, enters it and lets go of the host's.
pub(super) fn build(setup: &Setup, outside: &etc::Outside) -> Result<Built, StartFailure> {
    stage()?;
    tmpfs(LAYER, setup.layer_bytes, 0o755, NO_DEVICES)?;
    make_dir(&layer(WRITTEN))?;
    let stack = Stack::show(&setup.layers)?;
    match &setup.image {
        Image::Host => from_host(setup, &stack, outside)?,
        Image::Directory(path) => from_directory(path, setup, &stack, outside)?,
        Image::Root => from_root(setup, &stack, outside)?,
        // The host refuses it by name before it starts anything.
        Image::File(path) => return Err(Errno::ENOTDIR).at(step::OPEN_IMAGE, &path.to_string_lossy()),
    }
    tmpfs(&inside("/tmp"), setup.tmp_bytes, 0o1777, NO_DEVICES)?;
    devices(setup)?;
    let ipc_is_limited = proc::mount(setup)?;
    binds::mount_all(&setup.binds)?;
    let kept = if setup.freezable { Some(keep()?) } else { None };
    let layer = open(LAYER, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).at("open", "layer")?;
    tmpfs(SCRATCH, SCRATCH_BYTES, 0o700, NO_PROGRAMS)?;
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let scratch = open(SCRATCH, flags, Mode::empty()).at("open", "scratch")?;
    enter()?;
    Ok(Built { layer, kept, scratch, ipc_is_limited })
}

/// Returns the tmpfs that is written to, after a note in it of what is there so far.
fn keep() -> Result<OwnedFd, StartFailure> {
    made::note(&layer(WRITTEN), Path::new(LAYER))?;
    open(LAYER, OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()).at("open", "layer")
}

/// Makes a small tmpfs the root, with everything there was at [`HOST`].
fn stage() -> Result<(), StartFailure> {
    // Nothing mounted here may show outside, nor anything mounted outside show here.
    change("/", MsFlags::MS_REC | MsFlags::MS_PRIVATE)?;
    // Some folder is needed to put the stage on; which one does not matter, since the stage leaves it at once.
    let base = ["/tmp", "/run", "/mnt"].into_iter().find(|path| Path::new(path).is_dir()).unwrap_or("/proc");
    tmpfs(base, 1 << 20, 0o755, NO_DEVICES)?;
    for name in [HOST, ROOT, LAYER, LAYERS, IMAGE, SCRATCH] {
        make_dir(&Path::new(base).join(&name[1..]))?;
    }
    chdir(base).at("enter", base)?;
    pivot_root(".", &HOST[1..]).at("change root", base)?;
    chdir("/").at("enter", "stage")
}

/// Makes the sandbox's tree the root and detaches the stage.
fn enter() -> Result<(), StartFailure> {
    chdir(ROOT).at("enter", "root")?;
    pivot_root(".", ".").at("change root", "root")?; // the old root now lies on top of the new one
    umount2(".", MntFlags::MNT_DETACH).at("unmount", "host")?;
    chdir(WORKSPACE).at("enter", WORKSPACE)
}

/// The host's programs, each top folder with a writable layer over it, and an `/etc` of our own making.
fn from_host(setup: &Setup, stack: &Stack, outside: &etc::Outside) -> Result<(), StartFailure> {
    let base = layer(WRITTEN);
    furnish(&base, stack)?;
    let mut tops = Vec::new();
    for name in PROGRAMS {
        let from = Path::new(HOST).join(name);
        let Ok(meta) = fs::symlink_metadata(&from) else { continue };
        match stack.find(Path::new(name)).at("read layers", name)? {
            Said::Here(Found::Folder { mode }) if meta.is_dir() => {
                make_folder(&base.join(name), mode).at("make folder", name)?;
                tops.push(*name);
            }
            Said::Nothing if meta.is_dir() => {
                make_dir(&base.join(name))?;
                tops.push(*name);
            }
            Said::Nothing if meta.is_symlink() => {
                let target = fs::read_link(&from).at("read link", name)?;
                symlink(target, base.join(name)).at("make link", name)?;
            }
            Said::Nothing | Said::Gone | Said::Here(_) => {}
        }
    }
    let shown = etc::copy_shown(&Path::new(HOST).join("etc"), &base, stack)?;
    etc::generate(&base, None, stack, setup, outside)?;
    binds::prepare(&setup.binds, &Layers { base: &base, image: Path::new(HOST), stack, tops: Some(&tops) })?;
    let work = layer("works");
    make_dir(&work)?;
    show_base(&base, stack)?;
    for name in tops {
        let (from, target) = (Path::new(HOST).join(name), inside(name));
        let lower = Lower::of(&from, Path::new(name), stack)?;
        if !add_layer(setup, &lower, &base.join(name), &work.join(name), &target)? {
            // Refused where something is mounted below, as container runtimes do with drivers: read-only then.
            lower.demand_nothing()?;
            bind_mount_alone(&from, Path::new(&target))?;
            sys::seal_mount(Path::new(&target), Seal::Files).at("make read-only", name)?;
        }
    }
    for name in shown {
        let target = inside(&format!("etc/{name}"));
        bind_mount(&Path::new(HOST).join("etc").join(&name), Path::new(&target))?;
        sys::seal_mount(Path::new(&target), Seal::Files).at("make read-only", &target)?;
    }
    Ok(())
}

/// An unpacked image with a writable layer over it.
fn from_directory(path: &Path, setup: &Setup, stack: &Stack, outside: &etc::Outside) -> Result<(), StartFailure> {
    let name = path.to_string_lossy();
    let source = on_stage(path);
    fs::read_dir(&source).at(step::OPEN_IMAGE, &name)?;
    // Its path may hold a character that means something in mount options.
    bind_mount(&source, Path::new(IMAGE)).map_err(|failure| StartFailure { target: name.to_string(), ..failure })?;
    let image = Path::new(IMAGE);
    let upper = prepare(image, setup, stack, outside)?;
    let lower = Lower::of(image, Path::new(""), stack)?;
    if add_layer(setup, &lower, &upper, &layer("work"), ROOT)? {
        return Ok(());
    }
    by_folders(setup, stack, image, &upper)
}

/// The root file system that a launcher has made, with a writable layer over it.
fn from_root(setup: &Setup, stack: &Stack, outside: &etc::Outside) -> Result<(), StartFailure> {
    let upper = prepare(Path::new(HOST), setup, stack, outside)?;
    // As a whole it cannot be a layer's lower part: the launcher has mounted things in it.
    by_folders(setup, stack, Path::new(HOST), &upper)
}

/// Makes in the writable layer what has to be there before it lies over an image. It is ours, whoever owns the image's folders,
/// and no link of the image is followed.
fn prepare(image: &Path, setup: &Setup, stack: &Stack, outside: &etc::Outside) -> Result<PathBuf, StartFailure> {
    let upper = layer(WRITTEN);
    furnish(&upper, stack)?;
    etc::generate(&upper, Some(image), stack, setup, outside)?;
    binds::prepare(&setup.binds, &Layers { base: &upper, image, stack, tops: None })?;
    Ok(upper)
}

/// An image that overlayfs refuses as a whole: `base` is the root, and each top folder of the image has a layer of its own
/// there, or is read-only where overlayfs refuses that folder too.
fn by_folders(setup: &Setup, stack: &Stack, image: &Path, base: &Path) -> Result<(), StartFailure> {
    let work = layer("works");
    make_dir(&work)?;
    show_base(base, stack)?;
    for entry in fs::read_dir(image).at("read", "image")? {
        let entry = entry.at("read", "image")?;
        let name = entry.file_name();
        let (from, target) = (entry.path(), Path::new(ROOT).join(&name));
        let said = name.to_string_lossy();
        if COVERED.iter().any(|covered| *covered == said) {
            continue;
        }
        let kind = entry.file_type().at("read", &said)?;
        match stack.find(Path::new(&name)).at("read layers", &said)? {
            Said::Nothing | Said::Here(Found::Folder { .. }) if kind.is_dir() => {
                let lower = Lower::of(&from, Path::new(&name), stack)?;
                if lower.has_image {
                    top_folder(setup, &said, &lower, [&base.join(&name), &work.join(&name), &target])?;
                }
            }
            Said::Nothing if kind.is_symlink() && !target.exists() => {
                symlink(fs::read_link(&from).at("read link", &said)?, target).at("make link", &said)?;
            }
            Said::Nothing if kind.is_file() => top_file(&from, &target)?,
            // What the layers have there is shown with the root.
            Said::Nothing | Said::Gone | Said::Here(_) => {}
        }
    }
    Ok(())
}

/// Makes `base` the root, over what the layers have there. Their top folders that the image has too are covered later.
fn show_base(base: &Path, stack: &Stack) -> Result<(), StartFailure> {
    if stack.is_empty() {
        return bind_mount(base, Path::new(ROOT));
    }
    let nowhere = Path::new("");
    let layers = stack.roots().to_vec();
    let lower = Lower { image: nowhere, path: nowhere, layers, has_image: false, stack };
    overlay(&lower, base, &layer("base"), ROOT)
        .map_err(|failure| StartFailure { step: step::PUT_LAYERS.to_owned(), ..failure })
}

/// Shows one top folder of an image at `target`, where `upper` can be seen as yet.
fn top_folder(
    setup: &Setup,
    name: &str,
    lower: &Lower<'_>,
    [upper, work, target]: [&Path; 3],
) -> Result<(), StartFailure> {
    if !upper.exists() {
        // The folder of a layer stands for the one below it, its mode too.
        let mode = fs::metadata(lower.top()).at("read", name)?.mode() & 0o7777;
        make_folder(upper, mode).at("make folder", name)?;
    }
    if add_layer(setup, lower, upper, work, &target.to_string_lossy())? {
        return Ok(());
    }
    if name == "etc" {
        return copy_settings(lower.image, target, lower.stack);
    }
    if OWN.contains(&name) {
        return Ok(());
    }
    lower.demand_nothing()?;
    bind_mount_alone(lower.image, target)?;
    sys::seal_mount(target, Seal::Files).at("make read-only", name)
}

/// Shows one file of an image's root.
fn top_file(from: &Path, target: &Path) -> Result<(), StartFailure> {
    let name = from.to_string_lossy();
    if fs::metadata(from).is_ok_and(|meta| meta.len() <= MAX_COPY_BYTES) {
        // One that this user may not read is not for the sandbox either.
        let _ = fs::copy(from, target);
        return Ok(());
    }
    fs::File::create(target).at("make", &name)?;
    bind_mount(from, target)?;
    sys::seal_mount(target, Seal::Files).at("make read-only", &name)
}

/// The image's own settings, where they are not made up; a copy each, as the folder must stay writable.
fn copy_settings(from: &Path, etc: &Path, stack: &Stack) -> Result<(), StartFailure> {
    for entry in fs::read_dir(from).into_iter().flatten().flatten() {
        let target = etc.join(entry.file_name());
        let name = target.to_string_lossy();
        let Ok(kind) = entry.file_type() else { continue };
        let is_settled = match stack.find(&Path::new("etc").join(entry.file_name())).at("read layers", &name)? {
            Said::Nothing => target.exists(),
            // What a sandbox below has made to mount on.
            Said::Here(Found::Folder { .. }) => !kind.is_dir(),
            Said::Gone | Said::Here(_) => true,
        };
        if is_settled {
            continue;
        }
        if kind.is_dir() {
            make_dir(&target)?;
            bind_mount(&entry.path(), &target)?;
            sys::seal_mount(&target, Seal::Files).at("make read-only", &name)?;
        } else if kind.is_symlink() {
            symlink(fs::read_link(entry.path()).at("read link", &name)?, &target).at("make link", &name)?;
        } else if kind.is_file() {
            // One that this user may not read is not for the sandbox either.
            let _ = fs::copy(entry.path(), &target);
        }
    }
    Ok(())
}

/// Makes the folders that every sandbox has, but for those that the layers have a word on.
fn furnish(base: &Path, stack: &Stack) -> Result<(), StartFailure> {
    for name in FOLDERS.iter().chain(&[&HOME[1..], &WORKSPACE[1..]]) {
        if stack.has(name)? {
            continue;
        }
        stack.make_above(base, Path::new(name))?;
        let path = base.join(name);
        make_dir(&path)?;
        let mode = match *name {
            "root" => 0o700,
            "var/tmp" => 0o1777,
            _ => continue,
        };
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).at("set mode", name)?;
    }
    Ok(())
}

/// A `/dev` of a few nodes and a terminal multiplexer of its own.
fn devices(setup: &Setup) -> Result<(), StartFailure> {
    let dev = inside("/dev");
    tmpfs(&dev, 1 << 20, 0o755, MsFlags::MS_NOSUID)?;
    for name in DEVICES {
        let (from, target) = (Path::new(HOST).join("dev").join(name), format!("{dev}/{name}"));
        // A launcher without our configuration shows fewer.
        if from.exists() {
            fs::File::create(&target).at("make", &target)?;
            bind_mount(&from, Path::new(&target))?;
        }
    }
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ] {
        symlink(target, format!("{dev}/{name}")).at("make link", name)?;
    }
    let (pts, shm) = (format!("{dev}/pts"), format!("{dev}/shm"));
    make_dir(Path::new(&pts))?;
    make_dir(Path::new(&shm))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let options = format!("newinstance,ptmxmode=0666,mode=0620,max={TERMINALS}");
    mount(Some("devpts"), pts.as_str(), Some("devpts"), flags, Some(options.as_str())).at(step::MOUNT, "/dev/pts")?;
    tmpfs(&shm, setup.tmp_bytes, 0o1777, NO_DEVICES)
}

/// Where a path of the host is while the stage is the root.
pub(super) fn on_stage(path: &Path) -> PathBuf {
    below(Path::new(HOST), path)
}

fn below(base: &Path, path: &Path) -> PathBuf {
    base.join(path.components().filter(|part| matches!(part, Component::Normal(_))).collect::<PathBuf>())
}

fn layer(name: &str) -> PathBuf {
    Path::new(LAYER).join(name)
}

pub(super) fn inside(path: &str) -> String {
    format!("{ROOT}/{}", path.trim_start_matches('/'))
}

pub(super) fn make_dir(path: &Path) -> Result<(), StartFailure> {
    fs::create_dir_all(path).at("make folder", &path.to_string_lossy())
}

fn change(target: &str, flags: MsFlags) -> Result<(), StartFailure> {
    mount(None::<&str>, target, None::<&str>, flags, None::<&str>).at(step::MOUNT, target)
}

pub(super) fn bind_mount(source: &Path, target: &Path) -> Result<(), StartFailure> {
    // Recursive, because the kernel refuses to show what lies under a mount that it has locked.
    let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some(source), target, None::<&str>, flags, None::<&str>).at(step::MOUNT, &target.to_string_lossy())
}

/// Shows a folder without what is mounted below it, or with that where the kernel refuses, as it does for mounts that it has
/// locked.
fn bind_mount_alone(source: &Path, target: &Path) -> Result<(), StartFailure> {
    mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .or_else(|_locked| bind_mount(source, target))
}

pub(super) fn tmpfs(target: &str, bytes: u64, mode: u32, flags: MsFlags) -> Result<(), StartFailure> {
    // Files cost memory beside their bytes, so their number has a limit too: one for each page, and a few to start with.
    let files = bytes / 4096 + 4096;
    let options = format!("size={bytes},nr_inodes={files},mode={mode:o}");
    mount(Some("tmpfs"), target, Some("tmpfs"), flags, Some(options.as_str())).at(step::MOUNT, target)
}
