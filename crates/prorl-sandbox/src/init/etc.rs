//! The few files of `/etc` that a sandbox has: some of the host's, some made up.

use std::{
    fs,
    io::Read as _,
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, symlink},
    },
    path::Path,
};

use nix::{
    fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2},
    sys::stat::Mode,
    unistd::{getegid, geteuid},
};
use prorl_core::hello::StartFailure;

use super::{At, confine::user_of};
use crate::{Network, setup::Setup};

/// Entries of the host's `/etc` that programs need and that hold no secret. A missing one is passed over.
const SHOWN: &[&str] = &[
    "alternatives",
    "bindresvport.blacklist",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "ethertypes",
    "fonts",
    "gai.conf",
    "host.conf",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "lsb-release",
    "magic",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "perl",
    "pki/ca-trust/extracted",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "protocols",
    "redhat-release",
    "rpc",
    "services",
    "shells",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
];

/// Beginnings of names that are shown too: they carry a version.
const SHOWN_PREFIXES: &[&str] = &["java-", "python3"];

/// A file of `/etc` above this size is not copied, in bytes.
const MAX_COPY_BYTES: u64 = 4 << 20;

/// What has to be read before the host's files are out of sight.
pub(super) struct Outside {
    resolv_conf: Vec<u8>,
}

impl Outside {
    pub(super) fn read(setup: &Setup) -> Self {
        let resolv_conf = match setup.network {
            Network::None => Vec::new(),
            // Often a link into /run, which is gone later. A host without it resolves nothing, and neither will we.
            Network::Host => fs::read("/etc/resolv.conf").unwrap_or_default(),
        };
        Self { resolv_conf }
    }
}

/// Copies the shown files of `host_etc` to `etc`, and returns the folders among them, to be bound by the caller.
pub(super) fn copy_shown(host_etc: &Path, etc: &Path) -> Result<Vec<String>, StartFailure> {
    let mut names: Vec<String> = SHOWN.iter().map(|name| (*name).to_owned()).collect();
    let entries = fs::read_dir(host_etc).at("read", "/etc")?;
    names.extend(
        entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| SHOWN_PREFIXES.iter().any(|prefix| name.starts_with(prefix))),
    );
    let mut folders = Vec::new();
    for name in names {
        let (from, to) = (host_etc.join(&name), etc.join(&name));
        let Ok(meta) = fs::symlink_metadata(&from) else { continue };
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).at("make folder", &name)?;
        }
        if meta.is_symlink() {
            let target = fs::read_link(&from).at("read link", &name)?;
            symlink(target, &to).at("make link", &name)?;
        } else if meta.is_dir() {
            fs::create_dir_all(&to).at("make folder", &name)?;
            folders.push(name);
        } else if meta.is_file() && meta.size() <= MAX_COPY_BYTES {
            // One that this user may not read is not for the sandbox either.
            let Ok(text) = fs::read(&from) else { continue };
            fs::write(&to, text).at("write", &name)?;
        }
    }
    Ok(folders)
}

/// Writes the made-up files into `etc`, which exists. `image` is the image's own root, whose users are kept.
pub(super) fn generate(etc: &Path, image: Option<&Path>, setup: &Setup, outside: &Outside) -> Result<(), StartFailure> {
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    let (user, home) = user_of(setup);
    let shell = "/bin/sh";
    let standard = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";
    let passwd = image.and_then(|root| read_inside(root, "etc/passwd")).unwrap_or_else(|| standard.to_owned());
    let group = image
        .and_then(|root| read_inside(root, "etc/group"))
        .unwrap_or_else(|| "root:x:0:\nnogroup:x:65534:\n".to_owned());
    let hostname = &setup.hostname;
    let files: [(&str, Vec<u8>); 5] = [
        ("passwd", with_entry(&passwd, uid, &format!("{user}:x:{uid}:{gid}:{user}:{home}:{shell}")).into()),
        ("group", with_entry(&group, gid, &format!("{user}:x:{gid}:")).into()),
        ("hosts", format!("127.0.0.1\tlocalhost {hostname}\n::1\tlocalhost {hostname}\n").into()),
        ("hostname", format!("{hostname}\n").into()),
        ("resolv.conf", outside.resolv_conf.clone()),
    ];
    for (name, text) in files {
        fs::write(etc.join(name), text).at("write", name)?;
    }
    Ok(())
}

/// Puts `entry` first in a table of `name:x:id:...` lines, so that the id has that name, and drops another of that name.
fn with_entry(table: &str, id: u32, entry: &str) -> String {
    let name = entry.split(':').next();
    let id = id.to_string();
    let is_root = id == "0" && table.lines().any(|line| line.split(':').nth(2) == Some("0"));
    let mut text = if is_root { String::new() } else { format!("{entry}\n") };
    for line in table.lines().filter(|line| is_root || line.split(':').next() != name) {
        text.push_str(line);
        text.push('\n');
    }
    text
}

/// Reads a text file below `root`, as a process whose root directory is `root` would: no link leads out of it.
fn read_inside(root: &Path, path: &str) -> Option<String> {
    let root = open(root, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()).ok()?;
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT);
    let file = fs::File::from(openat2(root.as_fd(), path, how).ok()?);
    let mut text = String::new();
    file.take(MAX_COPY_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_inside_is_named_once() {
        let table = "root:x:0:0::/root:/bin/sh\nagent:x:7:7::/old:/bin/sh\nx:x:1000:1000::/:/bin/sh\n";
        let own = with_entry(table, 1000, "agent:x:1000:1000:agent:/home/agent:/bin/sh");
        assert_eq!(
            own,
            "agent:x:1000:1000:agent:/home/agent:/bin/sh\nroot:x:0:0::/root:/bin/sh\nx:x:1000:1000::/:/bin/sh\n"
        );
        assert_eq!(with_entry(table, 0, "root:x:0:0:root:/root:/bin/sh"), table);
    }

    #[test]
    fn no_link_leads_out_of_an_image() {
        let image = tempfile::tempdir().unwrap();
        fs::create_dir(image.path().join("etc")).unwrap();
        symlink("/etc/hostname", image.path().join("etc/passwd")).unwrap();
        symlink("../../../../../../etc/hostname", image.path().join("etc/group")).unwrap();
        assert_eq!(read_inside(image.path(), "etc/passwd"), None);
        assert_eq!(read_inside(image.path(), "etc/group"), None);
        fs::write(image.path().join("etc/hostname"), "inside").unwrap();
        assert_eq!(read_inside(image.path(), "etc/group").as_deref(), Some("inside"));
    }
}
