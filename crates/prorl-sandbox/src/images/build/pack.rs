//! The short way: an unpacked image and its metadata are packed straight into an image file, with no copy in between.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    thread,
};

use serde_json::{Map, Value, json};

use super::{Compression, definition::Plain, run::Program};
use crate::images::{
    ImageError,
    sif::{DATA_OFFSET, write_header},
};

/// Where the metadata of an image is in it.
const METADATA: &str = ".singularity.d";

/// The links that the metadata has at the top of an image.
const LINKS: [(&str, &str); 2] = [("singularity", "runscript"), ("environment", "env/90-environment.sh")];

/// The section of a definition that is a file of the metadata, the file, and whether it is a script.
const FILES: [(&str, &str, bool); 4] = [
    ("environment", "env/90-environment.sh", true),
    ("runscript", "runscript", true),
    ("startscript", "startscript", true),
    ("help", "runscript.help", false),
];

/// Returns the program that packs an image into `part`, behind the place of its header.
pub(super) fn program(
    mksquashfs: &Path,
    compression: Compression,
    plain: &Plain,
    definition: &[u8],
    tree: &Path,
    part: &Path,
) -> Result<Program, ImageError> {
    let metadata = write_metadata(plain, definition, tree)?;
    // Made here, so that it gets the mode that images have: they are executable.
    File::options()
        .write(true)
        .create_new(true)
        .mode(0o777)
        .open(part)
        .map_err(|error| ImageError::at("make", part, error))?;
    let sources = sources(plain, &metadata)?;
    let mode = fs::metadata(&plain.folder).map_err(|error| ImageError::at("read base", &plain.folder, error))?;
    let n_threads = thread::available_parallelism().map_or(1, usize::from);
    let mut args: Vec<OsString> = sources.into_iter().map(OsString::from).collect();
    args.push(part.into());
    args.extend(compression.args().map(OsString::from));
    // Who may read an image may read all of it; whose the files were means nothing to whoever unpacks it.
    let options = ["-all-root", "-noappend", "-no-progress", "-quiet", "-no-recovery", "-exit-on-error"];
    args.extend(options.map(OsString::from));
    for (option, value) in [
        ("-root-mode", format!("{:o}", mode.permissions().mode() & 0o7777)),
        ("-offset", DATA_OFFSET.to_string()),
        ("-processors", n_threads.to_string()),
    ] {
        args.extend([option.into(), value.into()]);
    }
    Ok(Program::new(mksquashfs).args(args))
}

/// Makes an image file of what was packed.
pub(super) fn complete(part: &Path, plain: &Plain, definition: &[u8]) -> Result<(), ImageError> {
    let definition = String::from_utf8_lossy(definition);
    let inspection = inspection(plain, &definition).to_string();
    let complete = || {
        let file = File::options().read(true).write(true).open(part)?;
        let packed = file.metadata()?.len().checked_sub(DATA_OFFSET).filter(|len| *len > 0);
        let packed = packed.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "nothing was packed"))?;
        write_header(&file, packed, Some(&definition), Some(&inspection))
    };
    complete().map_err(|error| ImageError::at("write header of", part, error))
}

/// Returns what is packed side by side: everything in the image, and the metadata in place of any that is there.
fn sources(plain: &Plain, metadata: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let mut sources = Vec::new();
    for (folder, is_base) in [(metadata, false), (plain.folder.as_path(), true)] {
        let folder = std::path::absolute(folder).map_err(|error| ImageError::at("find", folder, error))?;
        let at = |error| ImageError::at("list", &folder, error);
        for entry in fs::read_dir(&folder).map_err(at)? {
            let entry = entry.map_err(at)?;
            let name = entry.file_name();
            let is_replaced =
                is_base && LINKS.iter().any(|(link, _)| name == *link) && metadata.join(&name).is_symlink();
            if !is_replaced {
                sources.push(entry.path());
            }
        }
    }
    Ok(sources)
}

/// Writes what launchers look for in an image, into a folder of its own.
fn write_metadata(plain: &Plain, definition: &[u8], tree: &Path) -> Result<PathBuf, ImageError> {
    let top = tree.join("metadata");
    let folder = top.join(METADATA);
    let write = || -> io::Result<()> {
        fs::create_dir_all(folder.join("env"))?;
        write_file(&folder.join("Singularity"), definition, false)?;
        for (section, file, is_script) in FILES {
            if let Some(text) = plain.section(section) {
                let text = if is_script { script(text) } else { text.to_owned() };
                write_file(&folder.join(file), text.as_bytes(), is_script)?;
            }
        }
        let labels = serde_json::to_vec_pretty(&labels(plain))?;
        write_file(&folder.join("labels.json"), &labels, false)?;
        for (link, target) in LINKS.iter().filter(|(_, target)| folder.join(target).exists()) {
            symlink(Path::new(METADATA).join(target), top.join(link))?;
        }
        for path in [&top, &folder, &folder.join("env")] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
        }
        Ok(())
    };
    write().map_err(|error| ImageError::at("write metadata into", &top, error))?;
    Ok(top)
}

fn write_file(path: &Path, text: &[u8], is_script: bool) -> io::Result<()> {
    fs::write(path, text)?;
    // Whatever the umask: the image may be read by anybody who has it.
    fs::set_permissions(path, fs::Permissions::from_mode(if is_script { 0o755 } else { 0o644 }))
}

fn labels(plain: &Plain) -> Map<String, Value> {
    let mut labels = Map::new();
    let schema = "org.label-schema";
    let from = plain.folder.display().to_string();
    labels.insert(format!("{schema}.schema-version"), json!("1.0"));
    labels.insert(format!("{schema}.usage.singularity.deffile.bootstrap"), json!("localimage"));
    labels.insert(format!("{schema}.usage.singularity.deffile.from"), json!(from));
    for line in plain.section("labels").unwrap_or_default().lines().map(str::trim) {
        let (name, value) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        if !name.is_empty() && !name.starts_with('#') {
            let value = value.trim();
            let bare = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
            labels.insert(name.to_owned(), json!(bare.unwrap_or(value)));
        }
    }
    labels
}

/// Returns what launchers show of an image without starting it.
fn inspection(plain: &Plain, definition: &str) -> Value {
    let mut attributes = Map::new();
    for section in ["runscript", "startscript"] {
        attributes.extend(plain.section(section).map(|text| (section.to_owned(), json!(script(text)))));
    }
    attributes.extend(plain.section("help").map(|text| ("helpfile".to_owned(), json!(text))));
    if let Some(text) = plain.section("environment") {
        let path = format!("/{METADATA}/env/90-environment.sh");
        attributes.insert("environment".to_owned(), json!({ path: script(text) }));
    }
    attributes.insert("labels".to_owned(), labels(plain).into());
    attributes.insert("deffile".to_owned(), json!(definition));
    json!({"data": {"attributes": attributes}, "type": "container"})
}

fn script(text: &str) -> String {
    format!("#!/bin/sh\n\n{text}")
}

impl Plain {
    fn section(&self, name: &str) -> Option<&str> {
        self.sections.iter().find(|(section, _)| section == name).map(|(_, text)| text.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_what_launchers_look_for() {
        let (base, tree) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir(base.path().join("etc")).unwrap();
        fs::write(base.path().join("singularity"), "of the base").unwrap();
        let sections = [
            ("environment", "    export A=1\n"),
            ("runscript", "    exec true\n"),
            ("labels", "    # none\n    author \"A B\"\n    empty\n    version  1.0 \n\n"),
        ];
        let sections = sections.map(|(name, text)| (name.to_owned(), text.to_owned())).to_vec();
        let plain = Plain { folder: base.path().to_owned(), sections };
        let top = write_metadata(&plain, b"the definition", tree.path()).unwrap();
        let read = |name: &str| fs::read_to_string(top.join(METADATA).join(name)).unwrap();
        assert_eq!(read("Singularity"), "the definition");
        assert_eq!(read("runscript"), "#!/bin/sh\n\n    exec true\n");
        assert_eq!(fs::metadata(top.join("singularity")).unwrap().permissions().mode() & 0o777, 0o755);
        assert!(!top.join(METADATA).join("startscript").exists());
        let labels: Map<String, Value> = serde_json::from_str(&read("labels.json")).unwrap();
        assert_eq!(
            (&labels["author"], &labels["empty"], &labels["version"]),
            (&json!("A B"), &json!(""), &json!("1.0"))
        );
        let mut sources = sources(&plain, &top).unwrap();
        sources.sort();
        let mut expected =
            [base.path().join("etc"), top.join(METADATA), top.join("environment"), top.join("singularity")];
        expected.sort();
        assert_eq!(sources, expected);
    }
}
