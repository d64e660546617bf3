from django.db import migrations

PRODUCTS = (
    ("Teapot", "Short and stout."),
    ("Kettle", "Whistles."),
    ("Cup", "Blue, with a chip."),
)


def add_products(apps, schema_editor):
    product = apps.get_model("shop", "Product")
    product.objects.bulk_create(
        product(
            name=name,
            description=description,
            stock=10,
            search_text=f"{name} {description}".casefold(),
        )
        for name, description in PRODUCTS
    )


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_initial")]
    operations = [migrations.RunPython(add_products, migrations.RunPython.noop)]
