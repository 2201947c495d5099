//! Finds the programs of an image by looking at files. No process is started: a sandbox starts in milliseconds, an
//! interpreter does not.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use prorl_core::hello::Python;

/// The programs of an image that the tools drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Programs {
    /// Path of the shell, if there is one.
    pub bash: Option<String>,
    /// The Python interpreter, if there is one.
    pub python: Option<Python>,
}

/// Looks along PATH for bash and python3, and beside the interpreter for IPython.
pub fn probe() -> Programs {
    probe_along(&env::split_paths(&env::var_os("PATH").unwrap_or_default()).collect::<Vec<_>>())
}

fn probe_along(path: &[PathBuf]) -> Programs {
    let find = |name: &str| path.iter().map(|folder| folder.join(name)).find(|file| is_program(file));
    let python = ["python3", "python"].into_iter().find_map(find);
    Programs {
        bash: find("bash").and_then(|file| file.into_os_string().into_string().ok()),
        python: python.and_then(|file| {
            let ipython = has_ipython(&file);
            Some(Python { path: file.into_os_string().into_string().ok()?, ipython })
        }),
    }
}

fn is_program(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Tells whether the folders from which this interpreter imports hold IPython.
///
/// They are `lib*/python3*/site-packages` and `dist-packages` under the prefix that holds `bin`, that of the link and that of
/// the file it leads to (a virtual environment is a link into another prefix), and `/usr/local` as on Debian.
fn has_ipython(python: &Path) -> bool {
    let real = fs::canonicalize(python).unwrap_or_else(|_| python.to_owned());
    let prefix = |file: &Path| file.parent().and_then(Path::parent).map(Path::to_owned);
    // A virtual environment sees only its own packages unless it says otherwise.
    let own = prefix(python);
    let isolated = own.as_ref().is_some_and(|prefix| {
        fs::read_to_string(prefix.join("pyvenv.cfg"))
            .is_ok_and(|config| !config.to_lowercase().replace(' ', "").contains("include-system-site-packages=true"))
    });
    let others = if isolated {
        vec![]
    } else {
        [prefix(&real), Some(PathBuf::from("/usr/local"))].into_iter().flatten().collect()
    };
    let version =
        real.file_name().and_then(|name| name.to_str()).filter(|name| name.starts_with("python3.")).map(str::to_owned);
    own.into_iter().chain(others).any(|prefix| {
        ["lib", "lib64"].iter().any(|lib| {
            folders(&prefix.join(lib))
                .filter(|folder| {
                    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                    // `python3` is Debian's folder for all versions.
                    name == "python3"
                        || version.as_deref().map_or(name.starts_with("python3"), |version| name == version)
                })
                .any(|folder| {
                    ["site-packages", "dist-packages"]
                        .iter()
                        .any(|sub| folder.join(sub).join("IPython").join("__init__.py").is_file())
                })
        })
    })
}

fn folders(parent: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(parent).into_iter().flatten().flatten().map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(file: &Path) {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "").unwrap();
        fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn programs_are_found_along_the_path_and_ipython_beside_the_interpreter() {
        let root = tempfile::tempdir().unwrap();
        let bin = root.path().join("usr/bin");
        assert_eq!(probe_along(std::slice::from_ref(&bin)), Programs::default());

        program(&bin.join("bash"));
        program(&bin.join("python3.99"));
        std::os::unix::fs::symlink("python3.99", bin.join("python3")).unwrap();
        let found = probe_along(&[root.path().join("none"), bin.clone()]);
        assert_eq!(found.bash.as_deref(), bin.join("bash").to_str());
        assert_eq!(
            found.python,
            Some(Python { path: bin.join("python3").to_str().unwrap().to_owned(), ipython: false })
        );

        // Another version's packages are not this interpreter's.
        program(&root.path().join("usr/lib/python3.98/site-packages/IPython/__init__.py"));
        assert!(!has_ipython(&bin.join("python3")));
        program(&root.path().join("usr/lib/python3.99/site-packages/IPython/__init__.py"));
        assert!(has_ipython(&bin.join("python3")));
    }

    #[test]
    fn a_virtual_environment_has_its_own_packages() {
        let root = tempfile::tempdir().unwrap();
        program(&root.path().join("usr/bin/python3.99"));
        program(&root.path().join("usr/lib/python3.99/site-packages/IPython/__init__.py"));
        let venv = root.path().join("venv");
        fs::create_dir_all(venv.join("bin")).unwrap();
        std::os::unix::fs::symlink(root.path().join("usr/bin/python3.99"), venv.join("bin/python3")).unwrap();
        fs::write(venv.join("pyvenv.cfg"), "include-system-site-packages = false\n").unwrap();
        assert!(!has_ipython(&venv.join("bin/python3")));
        fs::write(venv.join("pyvenv.cfg"), "include-system-site-packages = true\n").unwrap();
        assert!(has_ipython(&venv.join("bin/python3")));
    }
}
