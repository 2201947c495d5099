//! The configuration that a launcher is given: the site's, less everything that would put things into the image.

/// What is said in place of the site's own words. The guest makes `/tmp`, `/dev` and the rest itself.
const OURS: &[(&str, &str)] = &[
    ("allow pid ns", "yes"),
    ("allow user ns", "yes"),
    ("always use nv", "no"),
    ("always use rocm", "no"),
    ("config group", "no"),
    ("config passwd", "no"),
    ("config resolv_conf", "no"),
    ("mount dev", "yes"), // of which the guest takes a few nodes
    ("mount devpts", "no"),
    ("mount home", "no"),
    ("mount hostfs", "no"),
    ("mount proc", "yes"), // without one to be seen the kernel allows no other
    ("mount sys", "no"),
    ("mount tmp", "no"),
    ("sessiondir max size", "16"), // in MiB; holds folders to mount on
    ("user bind control", "yes"),
];

/// The site's own mounts, of which there are none.
const BINDS: &str = "bind path";

/// Rewrites a site's configuration.
pub(super) fn rewrite(site: &str) -> String {
    let mut text = String::new();
    for line in site.lines().map(str::trim) {
        let Some((name, _)) = line.split_once('=') else { continue };
        let name = name.trim();
        let is_ours = name == BINDS || OURS.iter().any(|(ours, _)| *ours == name);
        if !line.starts_with('#') && !is_ours {
            text.push_str(line);
            text.push('\n');
        }
    }
    text.extend(OURS.iter().map(|(name, value)| format!("{name} = {value}\n")));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sites_words_stay_but_for_what_gets_into_the_image() {
        let site = "# MOUNT HOME\nmount home = yes\nbind path = /scratch\n  bind path = /opt\n\nmemory fs type = ramfs\n\
                    # systemd cgroups = yes\nsystemd cgroups = no\nmount hostfs=yes\ngarbage\n";
        let text = rewrite(site);
        let (kept, ours) = text.split_at(text.find("allow pid ns").unwrap());
        assert_eq!(kept, "memory fs type = ramfs\nsystemd cgroups = no\n");
        assert_eq!(ours.lines().count(), OURS.len());
        assert!(ours.contains("mount home = no\n") && ours.contains("mount hostfs = no\n"));
        assert_eq!(rewrite(""), ours);
    }
}
