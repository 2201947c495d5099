//! The bearer token.

use prorl_core::Secret;
use prorl_server::{Error, ServerConfig};

use crate::support::{Service, answer, refused, small};

fn with_token(token: &str) -> ServerConfig {
    ServerConfig { token: Some(Secret::new(token.to_owned())), ..ServerConfig::default() }
}

#[tokio::test]
async fn everything_but_health_asks_for_the_token() {
    let service = Service::with(with_token("s3cret"), small()).await;
    for path in ["/healthz", "/readyz"] {
        assert_eq!(service.get(path).await.0, 200);
    }
    for path in ["/status", "/v1/handlers", "/v1/jobs/a", "/nothing"] {
        refused(&service.get(path).await, 401, "unauthorized");
    }
    for path in ["/start", "/stop", "/process", "/cancel", "/v1/jobs", "/add_llm_server", "/healthz/"] {
        refused(&service.post(path, None).await, 401, "unauthorized");
    }
    let url = format!("{}/status", service.url);
    let response = service.http.get(&url).send().await.unwrap();
    assert_eq!(response.headers()["www-authenticate"], "Bearer");
    refused(&answer(service.http.get(&url).bearer_auth("s3cre")).await, 401, "unauthorized");
    assert_eq!(answer(service.http.get(&url).bearer_auth("s3cret")).await.0, 200);
    service.end().await;
}

#[tokio::test]
async fn an_open_address_needs_a_token_or_a_word() {
    let open = || "0.0.0.0:0".parse().unwrap();
    let refused = Service::on(open(), ServerConfig::default(), small()).await.err().unwrap();
    assert!(matches!(refused, Error::NoToken(_)), "{refused}");
    let empty = Service::on("127.0.0.1:0".parse().unwrap(), with_token(" "), small()).await.err().unwrap();
    assert!(matches!(empty, Error::EmptyToken), "{empty}");

    Service::on(open(), with_token("x"), small()).await.unwrap().end().await;
    let insecure = ServerConfig { insecure_no_auth: true, ..ServerConfig::default() };
    Service::on(open(), insecure, small()).await.unwrap().end().await;
}
