from django import forms

from .models import Product


class OrderForm(forms.Form):
    product = forms.ModelChoiceField(Product.objects)
    quantity = forms.IntegerField(min_value=1, max_value=99)
    email = forms.EmailField()

    def arguments(self):
        """What the task gets: plain values, and nothing that differs when a request is repeated."""
        return {**self.cleaned_data, "product": self.cleaned_data["product"].pk}


class DescriptionForm(forms.ModelForm):
    class Meta:
        model = Product
        fields = ("description",)
