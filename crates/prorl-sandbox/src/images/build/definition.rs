//! What a definition file says, as far as that must be known here: what it builds on, and whether programs must run for it.

use std::path::{Path, PathBuf};

/// A definition file that is about to be built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DefinitionFile {
    /// What it is called in messages.
    pub(super) name: String,
    /// Its bytes, which are handed on as they are.
    pub(super) bytes: Vec<u8>,
    stages: Vec<Stage>,
}

/// A part of a definition file that starts from a base of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Stage {
    header: Vec<(String, String)>,
    sections: Vec<Section>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Section {
    name: String,
    /// What follows the name in its line.
    args: String,
    text: String,
}

/// What a stage starts from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BaseImage {
    /// An image file or an unpacked image.
    Local(PathBuf),
    /// Nothing but these files and folders of the host, which may be patterns.
    Scratch(Vec<PathBuf>),
    /// Something that is fetched from elsewhere.
    Reference(String),
}

/// A definition that only puts metadata beside the files of an unpacked image: nothing has to run for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plain {
    /// The unpacked image.
    pub(super) folder: PathBuf,
    /// The texts of its sections, by name.
    pub(super) sections: Vec<(String, String)>,
}

/// The sections that are metadata. `%test` is none: it is run.
const METADATA: [&str; 5] = ["environment", "runscript", "startscript", "labels", "help"];

impl DefinitionFile {
    pub(super) fn new(name: String, bytes: Vec<u8>) -> Self {
        let stages = parse(&String::from_utf8_lossy(&bytes));
        Self { name, bytes, stages }
    }

    /// Returns what its stages start from, in their order.
    pub(super) fn bases(&self) -> Vec<BaseImage> {
        self.stages.iter().map(Stage::base).collect()
    }

    /// Tells whether it starts from something that is fetched from elsewhere.
    pub(super) fn is_fetched(&self) -> bool {
        self.bases().iter().any(|base| matches!(base, BaseImage::Reference(_)))
    }

    /// Returns what there is to pack, when nothing has to run for that.
    pub(super) fn plain(&self) -> Option<Plain> {
        let [stage] = self.stages.as_slice() else { return None };
        let BaseImage::Local(folder) = stage.base() else { return None };
        let is_plain = |section: &Section| METADATA.contains(&section.name.as_str()) && section.args.is_empty();
        let is_known = |(key, _): &(String, String)| ["bootstrap", "from"].contains(&key.as_str());
        // Apptainer has variables of its own, which it would replace.
        let is_template = self.bytes.windows(2).any(|two| two == b"{{");
        if is_template || !folder.is_dir() || !stage.header.iter().all(is_known) || !stage.sections.iter().all(is_plain)
        {
            return None;
        }
        let mut sections: Vec<(String, String)> = Vec::new();
        for section in &stage.sections {
            match sections.iter_mut().find(|(name, _)| *name == section.name) {
                Some((_, text)) => text.push_str(&section.text),
                None => sections.push((section.name.clone(), section.text.clone())),
            }
        }
        // One that was built before has metadata of its own, into which this would have to be worked.
        (!folder.join(".singularity.d").exists()).then_some(Plain { folder, sections })
    }
}

impl Stage {
    fn value(&self, key: &str) -> &str {
        self.header.iter().find(|(name, _)| name == key).map_or("", |(_, value)| value)
    }

    fn base(&self) -> BaseImage {
        let from = self.value("from");
        match self.value("bootstrap").to_ascii_lowercase().as_str() {
            "localimage" => BaseImage::Local(from.into()),
            "scratch" => BaseImage::Scratch(self.files()),
            kind => {
                let parts = [from, self.value("osversion"), self.value("mirrorurl"), self.value("include")];
                let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
                BaseImage::Reference(format!("{kind}://{}", parts.join(" ")))
            }
        }
    }

    /// Returns the host's files that are copied into it.
    fn files(&self) -> Vec<PathBuf> {
        let of_host = |section: &&Section| section.name == "files" && section.args.is_empty();
        let lines = self.sections.iter().filter(of_host).flat_map(|section| section.text.lines());
        lines.filter_map(first_word).map(PathBuf::from).collect()
    }
}

/// Returns the first word of a line, which may be quoted; nothing of an empty line or a comment.
fn first_word(line: &str) -> Option<String> {
    let line = line.trim();
    let mut chars = line.chars().peekable();
    let mut word = String::new();
    let mut quote = None;
    if line.starts_with('#') {
        return None;
    }
    while let Some(char) = chars.next() {
        match (char, quote) {
            ('\\', None | Some('"')) => word.extend(chars.next()),
            ('"' | '\'', None) => quote = Some(char),
            (char, Some(open)) if char == open => quote = None,
            (char, None) if char.is_whitespace() => break,
            (char, _) => word.push(char),
        }
    }
    (!word.is_empty()).then_some(word)
}

fn parse(text: &str) -> Vec<Stage> {
    let mut stages: Vec<Stage> = Vec::new();
    for line in text.lines() {
        let header = line.split_once(':').filter(|(key, _)| !key.is_empty() && is_word(key));
        let starts_stage = header.is_some_and(|(key, _)| key.eq_ignore_ascii_case("bootstrap"));
        if starts_stage || stages.is_empty() {
            stages.push(Stage::default());
        }
        let Some(stage) = stages.last_mut() else { continue };
        if let Some(name) =
            line.strip_prefix('%').filter(|name| name.starts_with(|first: char| first.is_ascii_alphabetic()))
        {
            let (name, args) = name.split_once(char::is_whitespace).unwrap_or((name, ""));
            let args = args.trim().to_owned();
            stage.sections.push(Section { name: name.to_ascii_lowercase(), args, text: String::new() });
        } else if let Some(section) = stage.sections.last_mut() {
            section.text.push_str(line);
            section.text.push('\n');
        } else if let Some((key, value)) = header {
            stage.header.push((key.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    // Comments before the first header are no stage.
    stages.retain(|stage| *stage != Stage::default());
    stages
}

fn is_word(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// Tells whether a path is a pattern, and returns the folder above its first wildcard.
pub(super) fn above_pattern(path: &Path) -> Option<PathBuf> {
    let mut above = PathBuf::new();
    for part in path {
        if part.as_encoded_bytes().iter().any(|byte| b"*?[".contains(byte)) {
            return Some(if above.as_os_str().is_empty() { ".".into() } else { above });
        }
        above.push(part);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition(text: &str) -> DefinitionFile {
        DefinitionFile::new("a.def".to_owned(), text.into())
    }

    #[test]
    fn bases_are_found_in_every_stage() {
        let text = "# one: two\nBootstrap: docker\nFrom: python:3.12\nStage: build\n\n%post\n  echo Bootstrap: no\n\
                    BootStrap: localimage\nFrom: /b.sif\n%files from build\n /a /b\n";
        let expected = [BaseImage::Reference("docker://python:3.12".into()), BaseImage::Local("/b.sif".into())];
        assert_eq!(definition(text).bases(), expected);
        let text = "Bootstrap: scratch\n%files\n  # no\n  /a /x\n  \"/b c\" /y\n  /d\\ e\n  '/f'\n\n%post\n true\n";
        let files = ["/a", "/b c", "/d e", "/f"].map(PathBuf::from).to_vec();
        assert_eq!(definition(text).bases(), [BaseImage::Scratch(files)]);
        let text = "Bootstrap: debootstrap\nOSVersion: bookworm\nMirrorURL: http://m/d\n";
        assert_eq!(definition(text).bases(), [BaseImage::Reference("debootstrap://bookworm http://m/d".into())]);
        assert_eq!(definition("%post\n x\n").bases(), [BaseImage::Reference("://".into())]);
        assert_eq!(definition("# nothing\n").bases(), []);
    }

    #[test]
    fn nothing_has_to_run_for_metadata_beside_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let from = format!("Bootstrap: localimage\nFrom: {}\n", folder.path().display());
        let plain =
            definition(&format!("{from}\n%environment\n export A=1\n%labels\n a b\n%environment\n export B=2\n"));
        let plain = plain.plain().unwrap();
        assert_eq!(plain.folder, folder.path());
        let expected = [("environment", " export A=1\n export B=2\n"), ("labels", " a b\n")];
        assert_eq!(plain.sections, expected.map(|(name, text)| (name.to_owned(), text.to_owned())));
        assert!(definition(&from).plain().is_some());
        for more in
            ["%post\n true\n", "%test\n true\n", "%files\n /a\n", "%runscript -c /bin/bash\n x\n", "%apprun x\n y\n"]
        {
            assert!(definition(&format!("{from}{more}")).plain().is_none(), "{more}");
        }
        assert!(definition(&format!("{from}Fingerprints: x\n")).plain().is_none());
        assert!(definition(&format!("{from}%help\n {{{{ x }}}}\n")).plain().is_none());
        assert!(definition("Bootstrap: localimage\nFrom: /missing\n").plain().is_none());
        std::fs::create_dir(folder.path().join(".singularity.d")).unwrap();
        assert!(definition(&from).plain().is_none());
    }

    #[test]
    fn patterns_stand_for_the_folder_above_them() {
        assert_eq!(above_pattern(Path::new("/a/b/c*/d")), Some("/a/b".into()));
        assert_eq!(above_pattern(Path::new("*.txt")), Some(".".into()));
        assert_eq!(above_pattern(Path::new("/a/b")), None);
    }
}
