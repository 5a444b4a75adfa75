use super::*;
use axum::http::HeaderValue;

fn access() -> Access {
    Access::new(&[7; SECRET_BYTES], &Secret::new("run")).expect("a secret")
}

fn headers(name: &'static str, value: &str) -> HeaderMap {
    let value = HeaderValue::from_str(value).expect("a header");
    HeaderMap::from_iter([(header::HeaderName::from_static(name), value)])
}

#[test]
fn a_key_is_good_for_its_own_rollout_only() {
    let access = access();
    let key = access.rollout_key(RolloutId(3));
    assert_eq!(key.reveal().len(), KEY_DIGITS);
    for (name, value) in [
        ("authorization", format!("Bearer {}", key.reveal())),
        ("authorization", format!("bearer  {} ", key.reveal())),
        ("x-api-key", key.reveal().to_owned()),
        ("api-key", key.reveal().to_owned()),
    ] {
        let headers = headers(name, &value);
        assert!(access.check("/rollouts/3/v1/models", &headers).is_ok());
        for path in [
            "/rollouts/4/v1/models",
            "/rollouts/33/v1/models",
            "/rollouts//v1/models",
            "/rollouts/%33/v1/models",
            "/rollouts/",
        ] {
            assert!(access.check(path, &headers).is_err(), "{path}");
        }
    }
}

#[test]
fn a_wrong_key_is_refused_and_a_foreign_one_does_not_hide_the_right_one() {
    let access = access();
    let path = "/rollouts/3/v1/messages";
    let key = access.rollout_key(RolloutId(3)).reveal().to_owned();
    for wrong in ["", "Bearer", "Bearer ", &key, &format!("Bearer {key}0")] {
        let refusal = access.check(path, &headers("authorization", wrong));
        assert_eq!(
            refusal.expect_err("is refused").status,
            StatusCode::UNAUTHORIZED
        );
    }
    let mut both = headers("x-api-key", "of-the-harness");
    both.insert(
        header::AUTHORIZATION,
        HeaderValue::from_str(&format!("Bearer {key}")).expect("a header"),
    );
    assert!(access.check(path, &both).is_ok());
}

#[test]
fn the_runs_key_opens_all_but_the_rollouts() {
    let access = access().opening(|path| path == "/health");
    let right = headers("authorization", "Bearer run");
    let wrong = headers("authorization", "Bearer ru");
    for path in [
        "/envs/lease",
        "/status",
        "/v1/models",
        "/page/now",
        "/health/",
    ] {
        assert!(access.check(path, &right).is_ok(), "{path}");
        assert!(access.check(path, &wrong).is_err(), "{path}");
    }
    assert!(access.check("/health", &HeaderMap::new()).is_ok());
    assert!(access.check("/rollouts/3/v1/models", &right).is_err());
}

#[test]
fn the_secret_survives_in_a_file_of_its_owner() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let first = Access::open(folder.path(), None).expect("makes a secret");
    let path = folder.path().join(SECRET_FILE);
    let mode = std::fs::metadata(&path)
        .expect("is there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let second = Access::open(folder.path(), None).expect("reads the secret");
    assert_eq!(
        first.rollout_key(RolloutId(1)),
        second.rollout_key(RolloutId(1))
    );
    std::fs::write(&path, b"short").expect("writes");
    let error = Access::open(folder.path(), None).err().expect("is refused");
    assert!(error.to_string().contains("5 bytes"), "{error}");
}

#[test]
fn a_run_without_a_configured_key_keeps_one_in_a_file_of_its_owner() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(RUN_KEY_FILE);
    let open = |configured: Option<&Secret>| Access::open(folder.path(), configured);
    let opens = |access: &Access, key: &str| {
        let sent = headers("authorization", &format!("Bearer {key}"));
        access.check("/status", &sent).is_ok()
    };
    let made = open(None).expect("makes a key");
    let key = std::fs::read_to_string(&path).expect("is there");
    let mode = std::fs::metadata(&path)
        .expect("is there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(key.trim_end().len(), 2 * RUN_KEY_BYTES);
    assert!(opens(&made, key.trim_end()));
    for wrong in [&HeaderMap::new(), &headers("authorization", "Bearer ")] {
        assert!(made.check("/status", wrong).is_err());
    }
    assert!(
        opens(&open(None).expect("reads the key"), key.trim_end()),
        "as before a restart"
    );

    let configured = open(Some(&Secret::new("mine"))).expect("takes the key");
    assert!(opens(&configured, "mine") && !opens(&configured, key.trim_end()));
    assert!(!path.exists(), "a key that opens nothing");

    for broken in ["", "\n", "a b\n"] {
        std::fs::write(&path, broken).expect("writes");
        let error = open(None).err().expect("is refused").to_string();
        assert!(
            error.contains(RUN_KEY_FILE) && error.contains("remove it"),
            "{error}"
        );
    }
}
