//! The few files of `/etc` that a sandbox has: some of the host's, some made up.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, OpenOptionsExt as _, symlink},
    },
    path::Path,
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2},
    sys::stat::Mode,
    unistd::{getegid, geteuid},
};
use prorl_core::hello::StartFailure;

use super::{
    At,
    confine::user_of,
    patiently,
    stack::{Found, Said, Stack},
};
use crate::{
    Network,
    setup::{Image, OWN_FOLDER, Setup},
};

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

/// A file for a fake root, by its name in `/etc`: settings of `apt`.
pub(super) const APT_CONFIG: &str = "prorl-apt.conf";

/// It downloads as another user otherwise, and makes sure that it is that user: a fake root may have one id only.
const APT_AS_ROOT: &str = "APT::Sandbox::User \"root\";\n";

/// Files of `/etc` that `useradd` and the like open for writing, beside the two that are made up anyway.
const ACCOUNTS: &[&str] = &[
    ".pwd.lock",
    "group-",
    "gshadow",
    "gshadow-",
    "passwd-",
    "shadow",
    "shadow-",
    "subgid",
    "subgid-",
    "subuid",
    "subuid-",
];

/// A file of `/etc` above this size is not copied, in bytes.
const MAX_COPY_BYTES: u64 = 4 << 20;

/// Accounts of the system have numbers up to this, the same on every machine of a distribution. Those above tell of the machine.
const LAST_SYSTEM_ID: u32 = 99;

/// What has to be read before the host's files are out of sight.
pub(super) struct Outside {
    resolv_conf: Vec<u8>,
    /// Lines of the host's `passwd` and `group` for a fake root among the host's programs.
    system_users: String,
    system_groups: String,
}

impl Outside {
    pub(super) fn read(setup: &Setup) -> Self {
        let resolv_conf = match setup.network {
            Network::None => Vec::new(),
            // Often a link into /run, which is gone later. A host without it resolves nothing, and neither will we.
            Network::Host => fs::read(host_resolv_conf(setup)).unwrap_or_default(),
        };
        let accounts = |path| match (&setup.image, setup.fakeroot) {
            (Image::Host, true) => system_accounts(&fs::read_to_string(path).unwrap_or_default()),
            _ => String::new(),
        };
        Self { resolv_conf, system_users: accounts("/etc/passwd"), system_groups: accounts("/etc/group") }
    }
}

/// Returns where the host's own is: in a launcher's root the usual place is the image's.
fn host_resolv_conf(setup: &Setup) -> String {
    let base = if setup.image == Image::Root { OWN_FOLDER } else { "/etc" };
    format!("{base}/resolv.conf")
}

/// Returns the accounts of the system in a table of `name:password:id:...` lines, without passwords and without members.
///
/// The post-install scripts of packages know them by name.
fn system_accounts(table: &str) -> String {
    let lines = table.lines().filter_map(|line| {
        let fields: Vec<_> = line.split(':').collect();
        match (fields.get(2)?.parse(), &fields[..]) {
            (Ok(1..=LAST_SYSTEM_ID), [name, _, id, _members]) => Some(format!("{name}:x:{id}:\n")),
            (Ok(1..=LAST_SYSTEM_ID), [name, _, id, gid, about, home, shell]) => {
                Some(format!("{name}:x:{id}:{gid}:{about}:{home}:{shell}\n"))
            }
            _ => None,
        }
    });
    lines.collect()
}

/// Copies the shown files of `host_etc` to the `etc` of `base`, and returns the folders among them, to be bound by the caller.
/// What the layers say of one is left as it is.
pub(super) fn copy_shown(host_etc: &Path, base: &Path, stack: &Stack) -> Result<Vec<String>, StartFailure> {
    let mut names: Vec<String> = SHOWN.iter().map(|name| (*name).to_owned()).collect();
    let entries = fs::read_dir(host_etc).at("read", "/etc")?;
    names.extend(
        entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| SHOWN_PREFIXES.iter().any(|prefix| name.starts_with(prefix))),
    );
    let mut folders = Vec::new();
    for name in names {
        let path = Path::new("etc").join(&name);
        let (from, to) = (host_etc.join(&name), base.join(&path));
        let Ok(meta) = fs::symlink_metadata(&from) else { continue };
        match stack.find(&path).at("read layers", &name)? {
            // The folder itself, which a sandbox below has made to mount on.
            Said::Here(Found::Folder { .. }) if meta.is_dir() => {
                folders.push(name);
                continue;
            }
            Said::Here(_) | Said::Gone => continue,
            Said::Nothing => stack.make_above(base, &path)?,
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

/// Writes the made-up files into the `etc` of `base`, but for those that the layers below it have a word on. `image` is the
/// image's own root, whose users are kept.
pub(super) fn generate(
    base: &Path,
    image: Option<&Path>,
    stack: &Stack,
    setup: &Setup,
    outside: &Outside,
) -> Result<(), StartFailure> {
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    let (user, home) = user_of(setup);
    let shell = "/bin/sh";
    let standard = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";
    let passwd = image
        .and_then(|root| read_inside(root, "etc/passwd"))
        .unwrap_or_else(|| format!("{standard}{}", outside.system_users));
    let group = image
        .and_then(|root| read_inside(root, "etc/group"))
        .unwrap_or_else(|| format!("root:x:0:\nnogroup:x:65534:\n{}", outside.system_groups));
    let files: [(&str, Vec<u8>); 5] = [
        ("passwd", with_entry(&passwd, uid, &format!("{user}:x:{uid}:{gid}:{user}:{home}:{shell}")).into()),
        ("group", with_entry(&group, gid, &format!("{user}:x:{gid}:")).into()),
        ("hosts", hosts(setup).into()),
        ("hostname", format!("{}\n", setup.hostname).into()),
        ("resolv.conf", outside.resolv_conf.clone()),
    ];
    for (name, text) in files {
        write_new(base, name, &text, stack)?;
    }
    if setup.fakeroot {
        write_new(base, APT_CONFIG, APT_AS_ROOT.as_bytes(), stack)?;
        if let Some(root) = image {
            open_accounts(base, root, stack, &passwd, &group)?;
        }
    }
    Ok(())
}

/// Writes a file that the layers say nothing of.
fn write_new(base: &Path, name: &str, text: &[u8], stack: &Stack) -> Result<(), StartFailure> {
    let path = Path::new("etc").join(name);
    if stack.has(&path)? {
        return Ok(());
    }
    stack.make_above(base, &path)?;
    fs::write(base.join(path), text).at("write", name)
}

/// Makes files of a fake root's own over those of an image that belong to somebody else. The post-install scripts of packages
/// add users and groups.
fn open_accounts(base: &Path, image: &Path, stack: &Stack, passwd: &str, group: &str) -> Result<(), StartFailure> {
    let locked = |table: &str, rest: &str| -> String {
        table.lines().filter_map(|line| Some(format!("{}:*{rest}\n", line.split_once(':')?.0))).collect()
    };
    for name in ACCOUNTS {
        let path = format!("etc/{name}");
        if is_foreign(image, &path) && !stack.has(&path)? {
            let text = match *name {
                "shadow" => locked(passwd, ":::::::"),
                "gshadow" => locked(group, "::"),
                _ => read_inside(image, &path).unwrap_or_default(),
            };
            stack.make_above(base, Path::new(&path))?;
            let made = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(base.join(&path));
            made.and_then(|mut file| file.write_all(text.as_bytes())).at("write", name)?;
        }
    }
    Ok(())
}

/// Names the sandbox's addresses. On a loopback interface that is shared with the host its name means its own address there,
/// and no other.
fn hosts(setup: &Setup) -> String {
    let name = &setup.hostname;
    match setup.loopback {
        Some(address) => format!("127.0.0.1\tlocalhost\n{address}\t{name}\n::1\tlocalhost\n"),
        None => format!("127.0.0.1\tlocalhost {name}\n::1\tlocalhost {name}\n"),
    }
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

/// Reads a text file below `root`.
fn read_inside(root: &Path, path: &str) -> Option<String> {
    let mut text = String::new();
    open_inside(root, path, OFlag::O_RDONLY | OFlag::O_NONBLOCK)
        .ok()?
        .take(MAX_COPY_BYTES)
        .read_to_string(&mut text)
        .ok()?;
    Some(text)
}

/// Tells whether a file below `root` is there and somebody else's.
fn is_foreign(root: &Path, path: &str) -> bool {
    let file = open_inside(root, path, OFlag::O_PATH);
    file.is_ok_and(|file| file.metadata().is_ok_and(|meta| meta.uid() != geteuid().as_raw()))
}

/// Opens a file below `root`, as a process whose root directory is `root` would: no link leads out of it.
fn open_inside(root: &Path, path: &str, access: OFlag) -> Result<fs::File, Errno> {
    let root = open(root, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    let how = OpenHow::new().flags(access | OFlag::O_CLOEXEC).resolve(ResolveFlag::RESOLVE_IN_ROOT);
    Ok(patiently(|| openat2(root.as_fd(), path, how))?.into())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn files_are_found_while_others_are_renamed() {
        let folder = tempfile::tempdir().unwrap();
        let (root, elsewhere) = (folder.path().join("root"), folder.path().join("elsewhere"));
        fs::create_dir_all(root.join("a")).unwrap();
        fs::write(root.join("file"), "").unwrap();
        fs::write(&elsewhere, "").unwrap();
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    let other = elsewhere.with_extension("new");
                    fs::rename(&elsewhere, &other).unwrap();
                    fs::rename(&other, &elsewhere).unwrap();
                }
            });
            let failed = (0..20_000).find_map(|_| open_inside(&root, "a/../a/../file", OFlag::O_RDONLY).err());
            is_done.store(true, Ordering::Relaxed);
            assert_eq!(failed, None);
        });
    }

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
    fn accounts_of_people_and_passwords_stay_outside() {
        let passwd = "root:x:0:0::/root:/bin/sh\ndaemon:hash:1:1:daemon:/usr/sbin:/bin/no\n_x:x:100:100::/:/\nbad\n\n";
        assert_eq!(system_accounts(passwd), "daemon:x:1:1:daemon:/usr/sbin:/bin/no\n");
        assert_eq!(system_accounts("adm:x:4:ada,bob\nada:x:1000:\n"), "adm:x:4:\n");
    }

    #[test]
    fn a_fake_root_gets_tables_of_passwords_over_those_of_others() {
        let (image, base) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir(image.path().join("etc")).unwrap();
        for name in ["gshadow", "shadow", "subuid"] {
            fs::write(image.path().join("etc").join(name), "the image's").unwrap();
        }
        if !geteuid().is_root() {
            return; // nobody else can give files away
        }
        for name in ["shadow", "subuid"] {
            std::os::unix::fs::chown(image.path().join("etc").join(name), Some(1), None).unwrap();
        }
        let stack = Stack::show(&[]).unwrap();
        let (passwd, group) = ("root:x:0:0::/:\nada:x:1:1::/:\n", "root:x:0:\n");
        open_accounts(base.path(), image.path(), &stack, passwd, group).unwrap();
        let made = |name: &str| fs::read_to_string(base.path().join("etc").join(name)).ok();
        assert_eq!(made("shadow").as_deref(), Some("root:*:::::::\nada:*:::::::\n"));
        assert_eq!(made("subuid").as_deref(), Some("the image's"));
        assert_eq!((made("gshadow"), made(".pwd.lock")), (None, None));
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
